"""What a user of `examples/pretrain.py` can do wrong gets one line that names it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretraining import checkpoint
from support.pretrain_run import EXAMPLES, InputError, after_step, assert_same, pretrain, run, saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden-size", "32"], "hidden_size is 16 there and 32 here"),
        (["--steps", "9"], "steps is 8 there and 9 here"),
        (["--seed", "5"], "seed is 0 there and 5 here"),
        (["--dtype", "bfloat16"], "dtype is float32 there and bfloat16 here"),
    ],
)
def test_a_checkpoint_of_another_configuration_names_the_field(
    text: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    run(text, tmp_path / "out")
    before = saved(tmp_path / "out")
    with pytest.raises(InputError, match=f"is of another configuration: {message}"):
        run(text, tmp_path / "out", "--resume", *arguments)
    assert_same(saved(tmp_path / "out"), before)


def test_a_checkpoint_of_another_text_is_refused(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "out")
    (text / "3.txt").write_text("changed " * 200)
    with pytest.raises(InputError, match=r"another configuration: data is [0-9a-f]{16} there"):
        run(text, tmp_path / "out", "--resume")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "training.pt"])
def test_a_damaged_checkpoint_is_named(text: Path, tmp_path: Path, name: str) -> None:
    run(text, tmp_path / "out")
    path = tmp_path / "out/checkpoint" / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot read the checkpoint") as error:
        run(text, tmp_path / "out", "--resume")
    assert "\n" not in str(error.value)


def test_nothing_to_resume(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to resume: there is no checkpoint"):
        run(text, tmp_path / "out", "--resume")
    assert not (tmp_path / "out").exists()


def refuse(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing.txt", "--data .*missing.txt: no such file or folder, and no file matches it as a pattern"),
        ("*.md", "no file matches it as a pattern"),
        ("empty.txt", "no text in .*empty.txt: no file that is neither empty nor binary"),
        ("binary", "no text in .*binary: no file that is neither empty nor binary"),
        ("folder", "no text in .*folder"),
        (
            "short.txt",
            "too little text in .*short.txt: 19 training and 3 held-out bytes, .* needs 17 of each",
        ),
    ],
)
def test_unusable_data_is_named_and_nothing_is_written(tmp_path: Path, data: str, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"ab\0cd" * 100)
    (tmp_path / "short.txt").write_text("twenty bytes of text")
    (tmp_path / "folder/.git").mkdir(parents=True)
    (tmp_path / "folder/.git/HEAD").write_text("hidden files are no text " * 100)
    with pytest.raises(InputError, match=message):
        run(tmp_path / data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unreadable_file_is_named(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", refuse)  # permissions do not stop root
    with pytest.raises(InputError, match=r"cannot read .*0.txt: Permission denied"):
        run(text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unwritable_output_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to --out .*file/out: Not a directory"):
        run(text, tmp_path / "file/out")


def test_an_exploding_run_stops_before_the_step(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"step \d: the gradient is (inf|nan), try a smaller --learning-rate"):
        run(text, tmp_path / "out", "--learning-rate", "1e30")


def test_sizes_that_contradict_each_other_are_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"top_k \(5\) must not exceed num_experts \(4\)"):
        run(text, tmp_path / "out", "--top-k", "5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--seed", "-1"], "argument --seed: must be at least 0, got -1"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--learning-rate", "nan"], "argument --learning-rate: must be at least 0, got nan"),
    ],
)
def test_options_that_are_no_numbers_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        pretrain.parse_options(arguments)
    assert message in capsys.readouterr().err


def test_the_command_prints_one_line_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pretrain.py"), "--data", str(tmp_path / "missing")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("pretrain: --data") and result.stderr.count("\n") == 1


def test_a_run_on_a_full_disk_ends_with_one_line_and_can_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run(text, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        run(text, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full_disk)
        with pytest.raises(InputError, match="No space left on device; the old one is intact"):
            run(text, tmp_path / "out", "--resume")
    assert len(saved(tmp_path / "out")["training"]) == 3
    run(text, tmp_path / "out", "--resume")
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "out"))
