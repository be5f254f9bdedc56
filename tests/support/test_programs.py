"""Programs that hang end with the stacks of all processes, wherever these were started."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.programs import HangError, Program, processes

HANG = """
import sys, time
from pathlib import Path

def hang_in_{name}():
    Path(sys.argv[1], "{name}" + "{suffix}").touch()
    time.sleep(1000)

{before}
hang_in_{name}()
"""
CHILD = HANG.format(name="child", suffix="", before="")
PARENT = HANG.format(
    name="parent",
    suffix="",
    before=f"""
import subprocess
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]], start_new_session=True)
""",
)
RANK = HANG.format(name="rank", suffix="{os.environ['RANK']}", before="").replace('"rank" + "', '"rank" + f"')


def python(folder: Path) -> list[str]:
    return [sys.executable, "-c", PARENT, str(folder)]


def torchrun(folder: Path) -> list[str]:
    script = folder.parent / "script.py"
    script.write_text("import os" + RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*command, str(script), str(folder)]


@pytest.mark.parametrize(
    ("command", "functions"),
    [(python, ["hang_in_parent", "hang_in_child"]), (torchrun, ["hang_in_rank", "hang_in_rank"])],
    ids=["python", "torchrun"],
)
def test_a_program_that_hangs_ends_with_the_stacks_of_its_processes(
    tmp_path: Path, command: Callable[[Path], list[str]], functions: list[str]
) -> None:
    (tmp_path / "started").mkdir()
    with Program(command(tmp_path / "started")) as program:
        program.wait_until(lambda: len([*(tmp_path / "started").iterdir()]) == len(functions))
        program.last = time.monotonic() + 0.1
        with pytest.raises(HangError, match=r"still running after 300 s: .*python") as error:
            program.wait()
        assert not processes(program.mark)
    for function in functions:
        assert str(error.value).count(f"in {function}\n") == functions.count(function)


def test_what_nobody_waits_for_is_an_error(tmp_path: Path) -> None:
    with (
        Program([sys.executable, "-c", "import sys; sys.exit('no such thing')"]) as program,
        pytest.raises(AssertionError, match=r"(?s)has ended with status 1.*stderr:\n +no such thing"),
    ):
        program.wait_until((tmp_path / "nothing").exists)
