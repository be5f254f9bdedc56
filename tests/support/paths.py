"""The paths through the operators that a test takes: our CPU kernels, ATen, and the CUDA kernels in their emulator."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

import maxmoe

EMULATOR = Path(maxmoe.__file__).with_name("libmaxmoe_cuda_emulator.so")
needs_emulator = pytest.mark.skipif(not EMULATOR.exists(), reason="the emulator of CUDA is built with the C++ tests")

# For a test that takes `every_path`: by default it runs in the emulator, which is slow, too.
emulated = pytest.mark.parametrize("every_path", ["cpu", "aten", "cuda"], indirect=True)


def each_case(names: str, cases: Iterable[tuple[Any, ...]], in_emulator: Collection[tuple[Any, ...]]) -> Any:
    """Parametrize `every_path` and some names; by default only some of the cases run in the emulator."""
    cases = list(cases)
    assert all(case in cases for case in in_emulator)
    values = [
        pytest.param(path, *case, marks=[pytest.mark.slow] * (path == "cuda" and case not in in_emulator))
        for path in ("cpu", "aten", "cuda")
        for case in cases
    ]
    return pytest.mark.parametrize(f"every_path, {names}", values, ids=str, indirect=["every_path"])
