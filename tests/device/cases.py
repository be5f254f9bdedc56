"""Cases of a device check: errors are caught per case, and each result is written to a JSON file at once.

The file holds the sections of all steps: `{"machine": {...}, "<step>": {"<group>": {"<case>": {...}}}}`.

The cases run in a process of their own. After an illegal access, or a failed assertion of the device, every later call
of CUDA in a process fails. So the process ends at the first case with such an error, and another one goes on with the
next case; likewise after a crash.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from device.machine import describe

Values = dict[str, Any]
NEXT_PROCESS = 75  # exit code of a process whose device has failed


class UnavailableError(Exception):
    """Something that a case needs is missing on this machine."""


class Cases:
    """The cases of one step.

    Attributes:
        device: device that is checked.
        is_cuda: whether it is a GPU of NVIDIA.
        is_tiny: whether this is a dry run, with small sizes and few cases.
        results: values by group and name.
    """

    def __init__(self, step: str, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.is_cuda = self.device.type == "cuda"
        self.is_tiny: bool = options.tiny
        self.results: dict[str, dict[str, Values]] = {}
        self._step = step
        self._out: Path = options.out
        self._journal = Journal(options.out)
        self._finished = self._journal.cases()
        self._end = time.monotonic() + options.seconds

    def run(self, group: str, name: str, body: Callable[..., Values], *arguments: object, **options: object) -> None:
        """Run a case, a function of these cases. It fails if it raises, or if its values hold `"ok": False`."""
        if (group, name) in self._finished:
            return
        self._journal.add(group, name)
        start = time.monotonic()
        values: Values
        if start > self._end:
            values = {"not_run": "no time was left"}
        else:
            try:
                values = body(self, *arguments, **options)
            except UnavailableError as reason:
                values = {"not_run": str(reason)}
            except Exception as error:
                where = traceback.format_exc()[-1000:]
                values = {"ok": False, "error_message": f"{type(error).__name__}: {error}"[:500], "traceback": where}
            values["seconds"] = round(time.monotonic() - start, 2)
        device_error = self._device_error()
        if device_error:
            values |= {"ok": False, "error_message": device_error}
        self.write(group, name, values)
        if device_error:
            os._exit(NEXT_PROCESS)

    def _device_error(self) -> str:
        """Return the error of the device, which every later call of this process would raise, or ""."""
        try:
            if self.is_cuda:
                torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)[:500]
        return ""

    def write(self, group: str, name: str, values: Values) -> None:
        """Add a case to the file."""
        print(f"{group}: {name}: {values}", flush=True)
        sections = json.loads(self._out.read_text()) if self._out.exists() else {"machine": describe(self.device)}
        sections.setdefault(self._step, {}).setdefault(group, {})[name] = values
        unfinished = self._out.with_suffix(".unfinished")  # the step may be killed while it writes
        unfinished.write_text(json.dumps(sections, indent=1))
        os.replace(unfinished, self._out)
        self.results.setdefault(group, {})[name] = values


class Journal:
    """The cases that the processes of a step have begun, in a file beside the results."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_suffix(".journal")

    def add(self, group: str, name: str) -> None:
        with self.path.open("a") as file:
            print(json.dumps([group, name]), file=file)

    def cases(self) -> list[tuple[str, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(group, name) for group, name in map(json.loads, lines)]


def main(step: str, check: Callable[[Cases], None]) -> None:
    """Run the step of a script; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few cases: the dry run")
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after this time")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    options = parser.parse_args()
    if options.here:
        check(Cases(step, options))
    else:
        sys.exit(run_in_processes(step, options))


def run_in_processes(step: str, options: argparse.Namespace) -> bool:
    """Run the cases in one process after the other, until all have run; return whether something failed."""
    end = time.monotonic() + options.seconds
    journal = Journal(options.out)
    journal.path.unlink(missing_ok=True)
    code, started = NEXT_PROCESS, -1
    while code != 0 and len(journal.cases()) > started:
        started = len(journal.cases())
        rest = ["--here", "--seconds", str(max(0.0, end - time.monotonic()))]
        code = subprocess.run([sys.executable, *sys.orig_argv[1:], *rest], check=False).returncode
        for group, name in journal.cases()[-1:]:
            if name not in read(step, options.out).get(group, {}):
                message = f"the process of this case ended with exit code {code}"
                Cases(step, options).write(group, name, {"ok": False, "error_message": message})
    results, ran = read(step, options.out), journal.cases()
    journal.path.unlink(missing_ok=True)
    every = {f"{group}: {name}": results[group][name] for group, name in ran}
    failed = [name for name, values in every.items() if values.get("ok") is False]
    missing = [name for name, values in every.items() if "not_run" in values]
    print(f"{step}: {len(every) - len(failed) - len(missing)} passed, {len(failed)} failed, {len(missing)} not run")
    print(*(f"FAILED {name}" for name in failed), *(f"NOT RUN {name}" for name in missing), sep="\n", flush=True)
    return code != 0 or bool(failed)


def read(step: str, path: Path) -> dict[str, dict[str, Values]]:
    """Return the results of a step by group and name."""
    return dict(json.loads(path.read_text()).get(step, {})) if path.exists() else {}


def rounded(value: float) -> float:
    """Return four significant digits."""
    return float(f"{value:.4g}")


def within(limit: float, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Values:
    """Compare tensors by the norm of their difference, relative to the norm of the expected values.

    Returns:
        The largest error, the name of its tensor, and whether it is below the limit. NaN is above every limit.
    """
    errors = {name: relative_error(got[name], value) for name, value in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"error": errors[worst], "tensor": worst, "limit": limit, "ok": errors[worst] < limit}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return |got - expected| / |expected| in float64; infinity for NaN."""
    difference = got.detach().cpu().double() - expected.detach().cpu().double()
    error = float(difference.norm() / expected.detach().double().norm().clamp_min(1e-30))
    return rounded(error) if error == error else float("inf")
