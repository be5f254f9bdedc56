"""Mistakes of users of `examples/pretrain.py` get one line that names them."""

import errno
import os
from pathlib import Path

import pytest

from examples.pretrain_run import InputError, assert_same, pretrain, run, saved
from pretraining.command import exit_status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "nothing to resume: there is no checkpoint"),
        (["--beside", "none"], "cannot read the checkpoint .*none/checkpoint: No such file or directory"),
        (["--top-k", "5"], r"top_k \(5\) must not exceed num_experts \(4\)"),
        (["--num-experts", "1000000000"], r"the run would need about [\d,.]+ GiB of memory, the machine has [\d,.]+"),
        (["--learning-rate", "1e30"], r"step \d: the gradient is (inf|nan), try a smaller --learning-rate"),
        (["--out", "/dev/null/out"], "cannot write to --out /dev/null/out: Not a directory"),
        (["--data", "missing.txt"], "--data missing.txt: no such file or folder, and no file matches it as a pattern"),
        (["--data", os.devnull], f"cannot read {os.devnull}: neither a file nor a folder"),
    ],
)
def test_a_run_that_is_not_possible_is_named(text: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(text, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_checkpoint_of_another_configuration_names_the_field(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "out", "--steps", "1")
    before = saved(tmp_path / "out")
    with pytest.raises(InputError, match="has another configuration: seed is 0 in the checkpoint and 5 in this run"):
        run(text, tmp_path / "out", "--resume", "--seed", "5")
    (text / "3.txt").write_text("changed " * 200)
    with pytest.raises(InputError, match=r"another configuration: data is [0-9a-f]{16} in the checkpoint"):
        run(text, tmp_path / "out", "--resume")
    assert_same(saved(tmp_path / "out"), before)


def test_options_that_are_no_numbers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pretrain.parse_options(["--learning-rate", "nan"])
    assert "argument --learning-rate: must be at least 0, got nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "not enough memory"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "[Errno 32] Broken pipe"),
        (InputError("a\x1b[2J name\n"), "a\\x1b[2J name\\n"),
    ],
)
def test_what_ends_a_command_is_one_line(capfd: pytest.CaptureFixture[str], error: Exception, message: str) -> None:
    def failing() -> int:
        raise error

    assert exit_status("pretrain", failing) == 1
    assert capfd.readouterr().err == f"pretrain: {message}\n"


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_status("pretrain", lambda: 1 // 0)
