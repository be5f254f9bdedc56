"""Damages small checkpoints of `examples/pretrain.py` in every way that comes to hand, and loads them.

    python tests/fuzz/fuzz_checkpoints.py --seconds 3600 --seed 1
    python tests/fuzz/fuzz_checkpoints.py --seed 1 --case 4711

A damaged checkpoint is an `InputError` of one line. With SHA256SUMS as it was, nothing else will do unless all files
are as they were; where the sums were made anew, as a stranger would, it may load. No case may run code that is in the
files, raise anything else, change what was not damaged, end the process, take much memory or long.
"""

import argparse
import io
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

from pretraining import InputError, checkpoint  # noqa: E402
from support.foreign_checkpoints import CreateFolder, add_sums, save_small, small_state  # noqa: E402

Files = dict[str, bytes]
PATIENCE = 60  # seconds for one case, on a busy machine
MEMORY = 2**30  # bytes for all cases of a process
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


def written_checkpoints(folder: Path) -> list[Files]:
    """One that one process has written, and one as two ranks write it."""
    save_small(folder / "checkpoint", 1.0)
    alone = {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()}
    together = {"training.json": alone["training.json"]}
    weight = small_state(1.0)["model"]["weight"]
    for number, part in enumerate(weight.split(3)):
        tensors, offsets = {"model.weight": part.contiguous()}, {"model.weight": {"saved_offsets": [3 * number, 0]}}
        if number == 0:
            tensors["optimizer.step"] = torch.tensor(1.0)
            offsets["optimizer.step"] = {"saved_offsets": []}
        data = safetensors.torch.save(tensors, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        together[f"shard-0000{number + 1}-model-00001-of-00001.safetensors"] = data
    for path in (folder / "checkpoint").iterdir():
        path.unlink()
    for name, data in together.items():
        (folder / "checkpoint" / name).write_bytes(data)
    add_sums(folder / "checkpoint")
    together["SHA256SUMS"] = (folder / "checkpoint/SHA256SUMS").read_bytes()
    shutil.rmtree(folder / "checkpoint")
    return [alone, together]


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
    """Put something that is not a file there, or nothing."""
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
    """Add a file, under a name that something may read."""
    names = [".metadata", "__0_0.distcp", "training.pt", "x.safetensors", "\x1b[2J\n", "model.safetensors.index.json"]
    (folder / random.choice(names)).write_bytes(poison(b"", random, []))


def exchanged(folder: Path, random: Random) -> None:
    """Let two files have each other's name."""
    one, other = random.sample(sorted(folder.iterdir()), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def one_case(folder: Path, checkpoints: list[Files], random: Random) -> str:
    """Damage a checkpoint, load it, and say what came of it."""
    good = random.choice(checkpoints)
    folder.mkdir()
    for name, data in good.items():
        (folder / name).write_bytes(data)
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
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < 2**30]
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
    """What was loaded has its shape, and what was not damaged its value."""
    assert state["model"]["weight"].shape == (4, 6) and state["model"]["weight"].dtype == torch.float32
    assert type(training["steps"]) is int and all(type(step) is int for step, _ in training["held_out"])
    assert sum(training["training"]) < float("inf")
    if "training.json" in unchanged:
        assert training == json.loads(good["training.json"])
    if unchanged >= {name for name in good if name.endswith(".safetensors")}:
        assert torch.equal(state["model"]["weight"], torch.ones(4, 6)) and state["optimizer"]["step"] == 1


# Many cases


def work(connection: Connection, seed: int, cases: range) -> None:
    """Run cases, each with a seed of its own, and send what came of each."""
    torch.set_num_threads(1)  # those of OpenMP are not forked
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, virtual + MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        checkpoints = written_checkpoints(Path(folder))
        for case in cases:
            try:
                outcome = one_case(Path("checkpoint"), checkpoints, Random(f"{seed} {case}"))
                assert not Path("created").exists(), "a file ran code"
            except BaseException as error:
                connection.send((case, f"{type(error).__name__}: {error}"))
                return
            shutil.rmtree("checkpoint")
            connection.send((case, outcome))


def fuzz(seed: int, cases: range, seconds: float) -> Counter[str]:
    """Run cases until the time is up; raise an AssertionError that names the case that failed."""
    outcomes: Counter[str] = Counter()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(sender, seed, cases))
    process.start()
    sender.close()
    deadline, last = time.monotonic() + seconds, cases.start - 1
    try:
        while last < cases.stop - 1 and time.monotonic() < deadline:
            failure = f"seed {seed}, case {last + 1}: "
            assert receiver.poll(PATIENCE), f"{failure}it took more than {PATIENCE} s"
            try:
                last, outcome = receiver.recv()
            except EOFError:
                process.join()
                raise AssertionError(f"{failure}the process ended, exit code {process.exitcode}") from None
            assert outcome in ("refused", "loaded", "unchanged"), failure + outcome
            outcomes[outcome] += 1
    finally:
        process.kill()
        process.join()
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args()
    chosen = range(10**9) if options.case is None else range(options.case, options.case + 1)
    print(dict(fuzz(options.seed, chosen, options.seconds)))
