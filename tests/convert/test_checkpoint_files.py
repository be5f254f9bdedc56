"""Checkpoints that are not in safetensors format: the error names the file."""

import os
from pathlib import Path

import pytest

from maxmoe import MoE, presets

pytest.importorskip("safetensors")

from maxmoe.convert.checkpoint import read_checkpoint, write_checkpoint

LAYERS = {"model.layers.0": MoE(presets.mixtral(hidden_size=4, intermediate_size=4))}


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"\xff" * 64,
        header('{"a": nope'),
        header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}') + bytes(16),
    ],
    ids=["empty", "pickle", "long header", "no JSON", "cut off", "offsets"],
)
def test_which_file_is_no_safetensors_file(content: bytes, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", LAYERS, "mixtral")
    (tmp_path / "b.safetensors").write_bytes(content)
    for path in (tmp_path, tmp_path / "b.safetensors"):
        with pytest.raises(ValueError, match=rf"^{tmp_path}/b\.safetensors must be a safetensors file: "):
            read_checkpoint(path, LAYERS, "mixtral")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer."""
    os.mkfifo(tmp_path / "a.safetensors")
    for path in (tmp_path, tmp_path / "a.safetensors", Path("/dev/zero")):
        place = tmp_path / "a.safetensors" if path == tmp_path else path
        with pytest.raises(ValueError, match=f"^{place} must be a safetensors file$"):
            read_checkpoint(path, LAYERS, "mixtral")
    with pytest.raises(FileNotFoundError, match="none"):
        read_checkpoint(tmp_path / "none", LAYERS, "mixtral")
