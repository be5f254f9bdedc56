"""Mistakes of users of `examples/pretrain.py` get one line that names them."""

import errno
import os
import sys
from pathlib import Path

import pytest

from pretraining import corpus
from pretraining.command import exit_status
from support import programs
from support.pretrain_run import EXAMPLES, InputError, assert_same, pretrain, run, saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "nothing to resume: there is no checkpoint"),
        (["--beside", "none"], "cannot read the checkpoint .*none/checkpoint: No such file or directory"),
        (["--top-k", "5"], r"top_k \(5\) must not exceed num_experts \(4\)"),
        (["--hidden-size", "2147483644"], "the model is too large: Storage size calculation overflowed"),
        (["--num-experts", "1000000000"], r"the run would need about [\d,.]+ GiB of memory, the machine has [\d,.]+"),
        (["--learning-rate", "1e30"], r"step \d: the gradient is (inf|nan), try a smaller --learning-rate"),
        (["--learning-rate", "1e10", "--steps", "1"], r"step 1: .*got NaN.*, try a smaller --learning-rate"),
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
    expected = {
        "--hidden-size 32": "hidden_size is 16 in the checkpoint and 32 in this run",
        "--seed 5": "seed is 0 in the checkpoint and 5 in this run",
        "--dtype bfloat16": "dtype is float32 in the checkpoint and bfloat16 in this run",
        "--optimizer muon": "optimizer is adamw in the checkpoint and muon in this run",
    }
    for arguments, message in expected.items():
        with pytest.raises(InputError, match=f"has another configuration: {message}"):
            run(text, tmp_path / "out", "--resume", *arguments.split())
    (text / "3.txt").write_text("changed " * 200)
    with pytest.raises(InputError, match=r"another configuration: data is [0-9a-f]{16} in the checkpoint"):
        run(text, tmp_path / "out", "--resume")
    assert_same(saved(tmp_path / "out"), before)


def test_data_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """Nothing else is opened: reading a pipe would wait for a writer."""
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"ab\0cd" * 100)
    (tmp_path / "short").write_text("twenty bytes of text")
    (tmp_path / "folder/.git").mkdir(parents=True)
    (tmp_path / "folder/.git/HEAD").write_text("hidden files are no text " * 100)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**42)
    expected = {
        "empty": "no text in .*empty: no file that is neither empty nor binary",
        "binary": "no text in .*binary: no file that is neither empty nor binary",
        "folder": "no text in .*folder",
        "short": "too little text in .*short: 19 training and 3 held-out bytes, .* needs 17 of each",
        "pipe": "cannot read .*pipe: neither a file nor a folder",
        "loop": "cannot read .*loop: neither a file nor a folder",
        "x" * 5000: "cannot read .*x+: File name too long",
        "large": "too much text: 4,398,046,511,104 bytes up to .*large, at most 4,294,967,296 are read",
    }
    for data, message in expected.items():
        with pytest.raises(InputError, match=message):
            corpus.load_corpus([str(tmp_path / data)], 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--learning-rate", "nan"], "argument --learning-rate: must be at least 0, got nan"),
        (["--seed", str(2**64)], "argument --seed: must be at most 18446744073709551615, got 18446744073709551616"),
    ],
)
def test_options_that_are_no_numbers_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        pretrain.parse_options(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory"),
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


def test_an_output_that_nobody_reads_ends_in_one_line() -> None:
    code = "import sys; from pretraining.command import exit_status as e; sys.exit(e('x', lambda: print('y') or 0))"
    read, write = os.pipe()
    os.close(read)
    command, buffered = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": ""}
    result = programs.run(command, cwd=EXAMPLES, env=buffered, stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "x: [Errno 32] Broken pipe\n")
