"""Written files replace existing ones atomically."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maxmoe import MoE, presets
from maxmoe.expert_load import LoadHistory
from maxmoe.files import replacing
from maxmoe.nn import RoutingRecord


def test_the_file_stays_if_writing_it_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for before in (None, b"before"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(KeyboardInterrupt):
            write_half(path)
        assert (path.read_bytes() if path.exists() else None) == before
        assert [each.name for each in tmp_path.iterdir()] == ([] if before is None else ["file"])


def write_half(path: Path) -> None:
    with replacing(path) as new:
        new.write_bytes(b"half")
        raise KeyboardInterrupt


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to("file")
    with replacing(link) as new:
        new.write_bytes(b"after")
    assert path.read_bytes() == b"after" and stat.S_IMODE(path.stat().st_mode) == 0o640 and link.is_symlink()
    with replacing(tmp_path / "other") as new:
        new.write_bytes(b"new")
    (tmp_path / "ordinary").touch()
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    """A pipe, which /dev/stdout may be."""
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with replacing(tmp_path / "pipe") as new, new.open("wb") as file:
        file.write(b"text")
    reader.join()
    assert got == [b"text"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def write_layer(path: Path) -> None:
    pytest.importorskip("safetensors")
    from maxmoe.convert.checkpoint import write_checkpoint

    layer = MoE(presets.mixtral(hidden_size=4, intermediate_size=4))
    write_checkpoint(path, {"model.layers.0": layer}, "mixtral")


class InterruptedWriteError(Exception):
    """An error at the end of writing."""


def interrupt(_descriptor: int) -> None:
    raise InterruptedWriteError


@pytest.mark.parametrize(
    "write",
    [
        lambda path: RoutingRecord({"moe": [torch.zeros(1, 2, 2)]}).save(path),
        lambda path: LoadHistory().write_csv(path),
        write_layer,
    ],
    ids=["record of routing", "history", "checkpoint"],
)
def test_every_writer_keeps_the_file_until_the_end(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", interrupt)
        with pytest.raises(InterruptedWriteError):
            write(path)
    assert path.read_bytes() == b"before"
    write(path)
    assert path.read_bytes() != b"before" and len([*tmp_path.iterdir()]) == 1
