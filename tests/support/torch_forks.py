"""Forks of a Python that has imported torch alone: they start in a tenth of the time of a new Python."""

import json
import subprocess
import sys
from pathlib import Path

from support.programs import Program

FORKS = """
import json, os, sys
import torch

for line in sys.stdin:
    code, environment, out, error = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        for path, descriptor in ((out, 1), (error, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class TorchForks:
    """The running Python. Leaving the context ends it."""

    def __init__(self, folder: Path) -> None:
        self.paths = folder / "out", folder / "error"
        command = [sys.executable, "-c", FORKS]
        self.program = Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        requests, statuses = self.program.process.stdin, self.program.process.stdout
        assert requests is not None and statuses is not None
        self.requests, self.statuses = requests, statuses

    def __enter__(self) -> "TorchForks":
        return self

    def __exit__(self, *_: object) -> None:
        self.program.close()
        for pipe in (self.requests, self.statuses):
            pipe.close()

    def run(self, code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run code in a fork, with more variables in its environment."""
        print(json.dumps([code, environment, *map(str, self.paths)]), file=self.requests, flush=True)
        status = int(self.statuses.readline())
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in self.paths))
