"""A Python that has imported torch and nothing of maxmoe, and forks for every piece of code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen  # that of Python, also where a test has replaced subprocess.Popen by forks

# Importing torch takes seconds: one process does it, and forks for every piece of code that it reads.
FORKS = """
import json, os, sys
import torch

for line in sys.stdin:
    code, folder, environment, outputs = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ.update(environment)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        exec(code, {})
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # names what may be meant, as Python does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@contextmanager
def python_with_torch(outputs: Path) -> Iterator[Python]:
    """Start it; what it yields runs code in a folder, this one if None, and an environment."""
    paths = [str(outputs / name) for name in ("stdout", "stderr")]
    command = [sys.executable, "-c", FORKS]
    with Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(code: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
            print(json.dumps([code, str(folder or os.getcwd()), environment, paths]), file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            return subprocess.CompletedProcess(code, status, *(Path(path).read_text() for path in paths))

        yield run
