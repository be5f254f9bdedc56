"""Cases of a device check: errors are caught per case, and each result is written to a JSON file at once.

The file holds the sections of all steps: `{"machine": {...}, "<step>": {"<group>": {"<case>": {...}}}}`.
"""

import argparse
import json
import os
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
        self._end = time.monotonic() + options.seconds

    def run(self, group: str, name: str, body: Callable[..., Values], *arguments: object, **options: object) -> None:
        """Run a case, a function of these cases. It fails if it raises, or if its values hold `"ok": False`."""
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
        self.results.setdefault(group, {})[name] = values
        print(f"{group}: {name}: {values}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the groups of this step in the file."""
        sections = json.loads(self._out.read_text()) if self._out.exists() else {"machine": describe(self.device)}
        sections.setdefault(self._step, {}).update(self.results)
        unfinished = self._out.with_suffix(".unfinished")  # the step may be killed while it writes
        unfinished.write_text(json.dumps(sections, indent=1))
        os.replace(unfinished, self._out)


def main(step: str, check: Callable[[Cases], None]) -> None:
    """Run the step of a script; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few cases: the dry run")
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after this time")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    cases = Cases(step, parser.parse_args())
    check(cases)
    every = {f"{group}: {name}": values for group, named in cases.results.items() for name, values in named.items()}
    failed = [name for name, values in every.items() if values.get("ok") is False]
    missing = [name for name, values in every.items() if "not_run" in values]
    print(f"{step}: {len(every) - len(failed) - len(missing)} passed, {len(failed)} failed, {len(missing)} not run")
    print(*(f"FAILED {name}" for name in failed), *(f"NOT RUN {name}" for name in missing), sep="\n")
    sys.stdout.flush()
    sys.exit(bool(failed))


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
