"""Text files as bytes, split by file into training text and held-out text."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretraining import InputError

# Precedes every file. Text does not contain it, so the model can learn how files begin.
SEPARATOR = b"\0"
HELD_OUT_FRACTION = 0.1
# The evaluation reads pieces at equal distances in the held-out text, 128 KiB in total.
EVALUATION_PIECES = 16
EVALUATION_PIECE_BYTES = 8192
LARGEST_TEXT = 4 * 2**30
# Installed packages, tests and generated tables.
STANDARD_LIBRARY_WITHOUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """The text of a run.

    Args:
        training: ``(N,)`` uint8, the training files, concatenated.
        held_out: ``(P, 1 + L)`` uint8, P pieces of held-out text. The last L bytes of each are predicted.
        description: number of files, source and sizes, for the user.
        fingerprint: hash of the text.
    """

    training: Tensor
    held_out: Tensor
    description: str
    fingerprint: str


def load_corpus(data: list[str], sequence_length: int) -> Corpus:
    """Read the files of `--data`, or the Python standard library if there are none, and split them.

    Raises:
        InputError: if a file cannot be read, nothing matches or the text is too short.
    """
    source = " ".join(data) or "the Python standard library (without tests, packages and tables)"
    try:
        texts = read_texts(named_files(data) if data else standard_library_files())
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    if not texts:
        raise InputError(f"no text in {source}: no file that is neither empty nor binary")
    training, held_out = split_by_file(texts)
    if min(len(training), len(held_out)) <= sequence_length:
        raise InputError(
            f"too little text in {source}: {len(training)} training and {len(held_out)} held-out bytes, "
            f"--sequence-length {sequence_length} needs {sequence_length + 1} of each"
        )
    return Corpus(
        training=torch.frombuffer(bytearray(training), dtype=torch.uint8),
        held_out=evaluation_pieces(held_out, sequence_length),
        description=f"{len(texts)} files of {source}: {len(training):,} training bytes, {len(held_out):,} held out",
        fingerprint=hashlib.sha256(training + held_out).hexdigest()[:16],
    )


def standard_library_files() -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of the standard library. The names are relative to its folder."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - STANDARD_LIBRARY_WITHOUT  # site-packages may have many thousand files
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    yield from ((str(path.relative_to(root)), path) for path in sorted(found))


def named_files(data: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file that `data` names: as a file, in a folder or by a glob pattern."""
    for argument in data:
        if not argument:
            raise InputError("--data '': an empty name; a dot is the current folder")
        path = Path(argument)
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(argument, recursive=True)]
        if not matches:
            raise InputError(f"--data {argument}: no such file or folder, and no file matches it as a pattern")
        for match in sorted(matches):
            if match.is_dir():
                inside = (file.relative_to(match) for file in sorted(match.rglob("*")) if file.is_file())
                yield from ((str(name), match / name) for name in inside if not hidden(name))
            else:
                yield str(match), match


def hidden(name: Path) -> bool:
    """Whether a path contains a hidden folder or `__pycache__`."""
    return any(part.startswith(".") or part == "__pycache__" for part in name.parts)


def read_texts(files: Iterable[tuple[str, Path]]) -> list[tuple[str, bytes]]:
    """Read every file once. Empty files and binary files, which contain a zero byte, are left out."""
    texts, size = [], 0
    for name, path in {os.path.realpath(path): (name, path) for name, path in files}.values():
        if not path.is_file():  # reading a pipe may block, and some devices never end
            raise InputError(f"cannot read {path}: neither a file nor a folder")
        try:
            size += path.stat().st_size
            if size > LARGEST_TEXT:
                raise InputError(f"too much text: {size:,} bytes up to {path}, at most {LARGEST_TEXT:,} are read")
            text = path.read_bytes() if path.stat().st_size else b""  # reading an empty file of /proc may block
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        if text and SEPARATOR not in text:
            texts.append((name, text))
    return texts


def split_by_file(texts: list[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Return training and held-out text. A tenth of the files is held out, selected by hash of the name.

    If there is a single file, its last tenth is held out.
    """
    if len(texts) == 1:
        text = texts[0][1]
        num_held_out = round(len(text) * HELD_OUT_FRACTION)
        return SEPARATOR + text[: len(text) - num_held_out], SEPARATOR + text[len(text) - num_held_out :]
    drawn = sorted(texts, key=lambda named: hashlib.sha256(os.fsencode(named[0])).digest())
    num_held_out = max(1, round(len(texts) * HELD_OUT_FRACTION))
    held_out, training = drawn[:num_held_out], drawn[num_held_out:]
    return (
        b"".join(SEPARATOR + text for _, text in training),
        b"".join(SEPARATOR + text for _, text in held_out),
    )


def evaluation_pieces(held_out: bytes, sequence_length: int) -> Tensor:
    """Return pieces ``(P, 1 + L)`` of the held-out text. L is a multiple of the sequence length."""
    num_sequences = (len(held_out) - 1) // sequence_length
    longest = max(1, EVALUATION_PIECE_BYTES // sequence_length)
    sequences_per_piece = min(longest, max(1, num_sequences // EVALUATION_PIECES))
    num_pieces = min(EVALUATION_PIECES, num_sequences // sequences_per_piece)
    length = 1 + sequences_per_piece * sequence_length
    starts = np.linspace(0, len(held_out) - length, num_pieces).astype(np.int64)
    text = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


class TrainingSequences:
    """Batches of sequences that depend only on the seed and the step.

    Each epoch splits the text into sequences, from a random offset, and shuffles them. There is no state between steps,
    so that a resumed run reads the same batches as an uninterrupted one.

    Args:
        text: ``(N,)`` uint8, N > sequence_length.
        sequence_length: tokens per sequence, S.
        batch_size: sequences per batch, B.
        seed: seed of the offsets and of the order.
    """

    def __init__(self, text: Tensor, *, sequence_length: int, batch_size: int, seed: int) -> None:
        self.text = text
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        # Number of sequences, with the byte after the last one, that remain after any offset below S.
        self.num_sequences = max(1, len(text) // sequence_length - 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a step, both ``(B, S)`` int64."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        starts = [self.start(*divmod(position, self.num_sequences)) for position in positions]
        rows = torch.stack([self.text[start : start + self.sequence_length + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def start(self, epoch: int, index: int) -> int:
        """Return the start of sequence `index` of the shuffled `epoch` in the text."""
        offset, order = epoch_order(self.seed, epoch, self.sequence_length, self.num_sequences)
        return min(offset + int(order[index]) * self.sequence_length, len(self.text) - self.sequence_length - 1)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, sequence_length: int, num_sequences: int) -> tuple[int, np.ndarray]:
    """Return the random offset of an epoch and the random order of its sequences."""
    generator = np.random.default_rng([seed, epoch])
    return int(generator.integers(sequence_length)), generator.permutation(num_sequences)
