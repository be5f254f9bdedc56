"""Damages small checkpoints of `examples/pretrain.py` in many ways, and loads them.

    python tests/fuzz/fuzz_checkpoints.py --seconds 3600 --seed 1
    python tests/fuzz/fuzz_checkpoints.py --seed 1 --case 4711

A damaged checkpoint is an `InputError` of one line. With the original SHA256SUMS this is required unless all files are
unchanged; with new sums, as an attacker would write, the checkpoint may load. No case may run code from the files,
raise another error, change undamaged values, end the process, or take much memory or time.
"""

import io
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

from fuzz import loop  # noqa: E402
from fuzz.child import Child  # noqa: E402
from pretraining import InputError, checkpoint  # noqa: E402
from support.foreign_checkpoints import CreateFolder, add_sums, save_small, small_state  # noqa: E402

Files = dict[str, bytes]
LONG = 2**16  # bytes; the damage multiplies it
NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    "1e999",
    "null",
]


@cache
def written_checkpoints() -> list[Files]:
    """A checkpoint written by one process, and one in the form that two ranks write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        save_small(folder, 1.0)
        alone = contents(folder)
        together = {"training.json": alone["training.json"]}
        weight = small_state(1.0)["model"]["weight"]
        for number, part in enumerate(weight.split(3)):
            tensors, offsets = {"model.weight": part.contiguous()}, {"model.weight": {"saved_offsets": [3 * number, 0]}}
            if number == 0:
                tensors["optimizer.step"] = torch.tensor(1.0)
                offsets["optimizer.step"] = {"saved_offsets": []}
            data = safetensors.torch.save(tensors, {"DCP_SHARDING_INFO": json.dumps(offsets)})
            together[f"shard-0000{number + 1}-model-00001-of-00001.safetensors"] = data
        shutil.rmtree(folder)
        write(folder, together)
        add_sums(folder)
        return [alone, contents(folder)]


def contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, files: Files) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# Damage to the bytes of a file


def flip(data: bytes, random: Random, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut(data: bytes, random: Random, others: list[bytes]) -> bytes:
    begin, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    return random.choice([data[:begin], data[begin:], data[:begin] + data[end:]])


def repeat(data: bytes, random: Random, others: list[bytes]) -> bytes:
    begin, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    return data[:end] + data[begin:end] * random.choice([1, 1, 2, 1000]) + data[end:]


def splice(data: bytes, random: Random, others: list[bytes]) -> bytes:
    other = random.choice(others)
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def overwrite(data: bytes, random: Random, others: list[bytes]) -> bytes:
    number = random.choice([number for number in NUMBERS if isinstance(number, int) and 0 <= number < 2**64])
    begin = random.choice([0, random.randint(0, len(data))])
    return data[:begin] + number.to_bytes(8, "little") + data[begin + 8 :]


def renumber(data: bytes, random: Random, others: list[bytes]) -> bytes:
    return substituted(data, rb"\d+", random, lambda: str(random.choice(NUMBERS)).encode())


def reword(data: bytes, random: Random, others: list[bytes]) -> bytes:
    words = [*re.findall(rb'"[^"]*"', data), b"[]", b"{}", b'"F64"', b'"BOOL"', b'"F8_E8M0"', b'"../../x"', b"[" * 5000]
    return substituted(data, rb'"[^"]*"', random, lambda: random.choice(words))


def substituted(data: bytes, pattern: bytes, random: Random, make) -> bytes:
    """Replace one match, and mend the length of a header of safetensors, so that it is read at all."""
    matches = list(re.finditer(pattern, data[:4096]))
    if not matches:
        return data
    match, new = random.choice(matches), make()
    changed = data[: match.start()] + new + data[match.end() :]
    length = int.from_bytes(data[:8], "little")
    if length < len(data) and data[8:9] == b"{":
        changed = max(0, length + len(new) - len(match[0])).to_bytes(8, "little") + changed[8:]
    return changed


def poison(data: bytes, random: Random, others: list[bytes]) -> bytes:
    stream = io.BytesIO()
    random.choice([pickle.dump, torch.save])(CreateFolder(Path("created")), stream)
    return random.choice([stream.getvalue(), data + stream.getvalue(), stream.getvalue() + data])


DAMAGES = [flip, flip, cut, repeat, splice, overwrite, renumber, renumber, renumber, reword, reword, reword, poison]


# Damage to the folder


def replaced(path: Path, random: Random) -> None:
    """Replace the file by something else, or by nothing."""
    path.unlink()
    random.choice([
        lambda: None,
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path),
        lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    ])()  # fmt: skip


def added(folder: Path, random: Random) -> None:
    """Add a file, under a name that a reader may open."""
    names = [".metadata", "__0_0.distcp", "training.pt", "x.safetensors", "\x1b[2J\n", "model.safetensors.index.json"]
    path = folder / random.choice(names)
    if not path.is_dir():  # an earlier damage may have made a folder of that name
        path.write_bytes(poison(b"", random, []))


def exchanged(folder: Path, random: Random) -> None:
    """Exchange the names of two files."""
    one, other = random.sample(sorted(folder.iterdir()), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def one_case(random: Random) -> str:
    """Damage a checkpoint, load it, and return the outcome."""
    outcome = damaged_and_loaded(Path("checkpoint"), random)
    assert not Path("created").exists(), "a file ran code"
    return outcome


def damaged_and_loaded(folder: Path, random: Random) -> str:
    """Compare the loaded values with the written ones."""
    good = random.choice(written_checkpoints())
    write(folder, good)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        damage(folder, good, random)
    new_sums = random.random() < 0.6 and all(
        path.is_file() and path.stat().st_size < 2**30 for path in folder.iterdir()
    )
    if new_sums:
        add_sums(folder)
    unchanged = {name for name, data in good.items() if (folder / name).is_file() and same(folder / name, data)}
    untouched = unchanged == good.keys() == {path.name for path in folder.iterdir()}
    state = small_state(0.0)
    try:
        training = checkpoint.load(folder, {"seed": 0}, state)
    except InputError as error:
        if untouched:
            raise AssertionError("a good checkpoint was refused") from error
        if not str(error).isprintable() or len(str(error)) > 1000:
            raise AssertionError("the message is not one line") from error
        return "refused"
    check_loaded(good, unchanged, state, training)
    assert new_sums or unchanged >= good.keys() - {"SHA256SUMS"}, "damage was not noticed"
    return "unchanged" if untouched else "loaded"


def damage(folder: Path, good: Files, random: Random) -> None:
    """Change something."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < LONG]
    kind = random.random()
    if kind < 0.05:
        added(folder, random)
    elif kind < 0.1 and len(files) >= 2 and len(files) == len(list(folder.iterdir())):
        exchanged(folder, random)
    elif kind < 0.15 and files:
        replaced(random.choice(files), random)
    elif files:
        path = random.choice(files)
        path.write_bytes(random.choice(DAMAGES)(path.read_bytes(), random, list(good.values())))


def same(path: Path, data: bytes) -> bool:
    """Compare; a file may be enormous."""
    return path.stat().st_size == len(data) and path.read_bytes() == data


def check_loaded(good: Files, unchanged: set[str], state: dict, training: dict) -> None:
    """Loaded values have their shapes, and undamaged ones their values."""
    assert state["model"]["weight"].shape == (4, 6) and state["model"]["weight"].dtype == torch.float32
    assert type(training["steps"]) is int and all(type(step) is int for step, _ in training["held_out"])
    assert sum(training["training"]) < float("inf")
    if "training.json" in unchanged:
        assert training == json.loads(good["training.json"])
    if unchanged >= {name for name in good if name.endswith(".safetensors")}:
        assert torch.equal(state["model"]["weight"], torch.ones(4, 6)) and state["optimizer"]["step"] == 1


if __name__ == "__main__":
    from fuzz import fuzz_checkpoints  # the name that another process can import

    with Child(fuzz_checkpoints.one_case) as child:
        sys.exit(loop.main(child, __doc__))
