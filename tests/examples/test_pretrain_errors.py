"""Mistakes of users of `examples/pretrain.py` get one line that names them."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest

from pretraining import corpus
from pretraining.command import exit_status
from support import programs
from support.foreign_checkpoints import add_sums
from support.pretrain_run import EXAMPLES, TINY, InputError, assert_same, pretrain, run, saved, words


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


def test_a_damaged_checkpoint_is_named(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "out", "--steps", "1")
    for name in ("shard-00001-model-00001-of-00001.safetensors", "training.json", "SHA256SUMS"):
        path = tmp_path / "out/checkpoint" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        with pytest.raises(InputError, match="cannot read the checkpoint") as error:
            run(text, tmp_path / "out", "--resume")
        assert "\n" not in str(error.value), name
        path.write_bytes(whole)
    assert run(text, tmp_path / "out", "--resume") == 0


def test_a_number_of_400_digits_in_a_checkpoint_is_named(text: Path, tmp_path: Path) -> None:
    """The number is not converted, neither when a run resumes nor when its curve is drawn."""
    run(text, tmp_path / "out", "--steps", "1")
    folder = tmp_path / "out/checkpoint"
    training = json.loads((folder / "training.json").read_text())
    for field, value in {"steps": 10**400, "held_out": [[10**400, 2.0]], "training": [10**400]}.items():
        (folder / "training.json").write_text(json.dumps({**training, field: value}))
        add_sums(folder)
        for out, option in (("out", "--resume"), ("new", f"--beside={tmp_path / 'out'}")):
            with pytest.raises(InputError, match=rf"/checkpoint: training.json has an invalid {field}: \[?10000"):
                run(text, tmp_path / out, option)


def test_a_run_that_cannot_stand_beside_is_named_before_the_work_begins(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "long", "--eval-every", "8", "--sequence-length", "8", "--steps", "1")
    (tmp_path / "empty/checkpoint").mkdir(parents=True)
    (tmp_path / "empty/checkpoint/training.json").write_text("{}")
    expected = {
        "none": "cannot read the checkpoint .*none/checkpoint: No such file or directory",
        "empty": "cannot read the checkpoint .*training.json does not have exactly configuration, steps",
        "long": "has another configuration: sequence_length is 8 in the checkpoint and 16 in this run",
    }
    for name, message in expected.items():
        with pytest.raises(InputError, match=message):
            run(text, tmp_path / "out", "--beside", str(tmp_path / name))
    assert not (tmp_path / "out").exists()


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


def test_data_that_has_no_end_or_no_name_is_named(tmp_path: Path) -> None:
    """Nothing is opened: reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**42)
    expected = {
        "": "--data '': an empty name",
        str(tmp_path / "pipe"): "cannot read .*pipe: neither a file nor a folder",
        "/dev/zero": "cannot read /dev/zero: neither a file nor a folder",
        str(tmp_path / "loop"): "cannot read .*loop: neither a file nor a folder",
        "x" * 5000: "cannot read x+: File name too long",
        str(tmp_path / "large"): "too much text: 4,398,046,511,104 bytes up to .*large, at most 4,294,967,296 are read",
    }
    for data, message in expected.items():
        with pytest.raises(InputError, match=message):
            corpus.load_corpus([data], 16)


def test_files_of_the_system_that_say_they_are_empty_are_not_read() -> None:
    """Reading this one waits for the next message of the kernel."""
    assert corpus.read_texts([("kmsg", Path("/proc/kmsg"))]) == []


def test_names_that_are_no_text_are_printed(tmp_path: Path) -> None:
    folder = words(Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme")))
    command = [sys.executable, str(EXAMPLES / "pretrain.py"), *TINY, "--top-k", "5", "--data", str(folder)]
    result = programs.run(command)
    assert result.returncode == 1 and "na\\udcffme" in result.stdout
    assert result.stderr == "pretrain: top_k (5) must not exceed num_experts (4)\n"


@pytest.mark.parametrize("name", ["loss.png", "expert_load.png", "checkpoint"])
def test_a_pipe_in_the_place_of_a_result_is_named_before_the_work_begins(text: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(InputError, match=rf"cannot write .*{name}: .*is not a"):
        run(text, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_an_output_that_is_a_loop_or_too_long_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for out, message in (("loop/out", "Too many levels of symbolic links"), ("x" * 5000, "File name too long")):
        with pytest.raises(InputError, match=f"cannot write to --out .*: {message}"):
            run(text, tmp_path / out)


def test_an_unwritable_output_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to --out .*file/out: Not a directory"):
        run(text, tmp_path / "file/out")


def test_an_exploding_run_stops_before_the_step(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"step \d: the gradient is (inf|nan), try a smaller --learning-rate"):
        run(text, tmp_path / "out", "--learning-rate", "1e30")


@pytest.mark.parametrize("steps", ["1", "8"])
def test_parameters_of_any_size_end_in_one_line(text: Path, tmp_path: Path, steps: str) -> None:
    """The router refuses their logits, in the next step or in the evaluation; nothing is saved."""
    with pytest.raises(InputError, match=r"step 1: .*got NaN.*, try a smaller --learning-rate"):
        run(text, tmp_path / "out", "--learning-rate", "1e10", "--steps", steps)
    assert not any((tmp_path / "out").iterdir())


def test_the_largest_seed_is_one(text: Path, tmp_path: Path) -> None:
    assert run(text, tmp_path / "out", "--seed", str(2**64 - 1), "--steps", "1") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-experts", "1000000000"],
        ["--batch-size", "2000000000"],
        ["--num-layers", "200", "--hidden-size", "20000"],
    ],
)
def test_a_run_that_the_machine_cannot_hold_is_named(text: Path, tmp_path: Path, arguments: list[str]) -> None:
    message = r"the run would need about [\d,.]+ GiB of memory, the machine has [\d,.]+: try a smaller model"
    with pytest.raises(InputError, match=message):
        run(text, tmp_path / "out", *arguments)


def test_sizes_that_torch_cannot_count_are_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model is too large: Storage size calculation overflowed"):
        run(text, tmp_path / "out", "--hidden-size", "2147483644")


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
        (["--learning-rate", "inf"], "argument --learning-rate: must be at most 1.7976931348623157e+308, got inf"),
        (["--seed", str(2**64)], "argument --seed: must be at most 18446744073709551615, got 18446744073709551616"),
        (["--num-experts", str(2**31)], "argument --num-experts: must be at most 2147483647, got 2147483648"),
        (["--num-layers", "201"], "argument --num-layers: must be at most 200, got 201"),
        (["--steps", "9" * 5000], "argument --steps: invalid int value"),
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
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "not enough memory",
        ),
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
    with pytest.raises(RuntimeError, match="of a bug"):
        exit_status("pretrain", bug)


def bug() -> int:
    raise RuntimeError("of a bug")


@pytest.mark.parametrize("stdout", ["/dev/full", "pipe"])
def test_an_output_that_nobody_reads_ends_in_one_line(stdout: str) -> None:
    code = (
        "import sys; from pretraining.command import exit_status; sys.exit(exit_status('x', lambda: print('y') or 0))"
    )
    if stdout == "pipe":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(stdout, os.O_WRONLY)
    command, buffered = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": ""}
    result = programs.run(command, cwd=EXAMPLES, env=buffered, stdout=write)
    os.close(write)
    assert result.returncode == 1
    assert result.stderr in ("x: [Errno 32] Broken pipe\n", "x: [Errno 28] No space left on device\n")


@pytest.mark.slow
def test_the_command_prints_one_line_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pretrain.py"), "--data", str(tmp_path / "missing")]
    result = programs.run(command)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("pretrain: --data") and result.stderr.count("\n") == 1


def test_the_help_shows_defaults_that_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pretrain.parse_options(["--help"])
    defaults = {*re.findall(r"\(default: (.*?)\)", capsys.readouterr().out)}
    assert "0" in defaults and not {"None", "False", ""} & defaults
