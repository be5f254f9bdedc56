"""The summary of the tests that a run left out and how to run them, one line for each reason."""

import re
from collections import defaultdict
from importlib import metadata
from typing import Any

import pytest

LEFT_OUT = "cases beyond the samples of their tests"  # in the output of a process of pytest-xdist


def explained(reason: str) -> str:
    """Return a reason with the command that installs the missing package."""
    missing = re.match(r"could not import '.*No module named '(\w+)", reason)
    if missing is None:
        return reason
    of_extras = [re.match(rf"{missing[1]}\b.*extra == .(\w+)", text) for text in metadata.requires("maxmoe") or ()]
    extra = next((found[1] for found in of_extras if found), None)
    install = f"pip install -e '.[{extra}]'" if extra else f"pip install {missing[1]}"
    return f"{missing[1]} is missing: {install}"


class NotRun:
    """Writes the summary."""

    def __init__(self) -> None:
        self.num_left_out = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.num_left_out = getattr(node, "workeroutput", {}).get(LEFT_OUT, 0)  # the same in every process

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = defaultdict(list)
        for report in terminalreporter.stats.get("skipped", ()):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            files[explained(reason)].append(report.nodeid.partition("::")[0])
        if not files and not self.num_left_out:
            return
        terminalreporter.section("not run")
        for reason, paths in sorted(files.items()):
            terminalreporter.write_line(f"{len(paths)} of {', '.join(sorted(set(paths)))}: {reason}")
        if self.num_left_out:
            terminalreporter.write_line(f'{self.num_left_out} {LEFT_OUT}: -m ""')
