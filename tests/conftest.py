"""The initial state of every test: the same random numbers and the same number of threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# OpenMP threads that wait for each other would spin on the processor that the other test process needs. libgomp reads
# the variable when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# The programs that tests start import the package that is tested, as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]))

import pytest
import torch

pytest.register_assert_rewrite("support", "fuzz", "ranks")

EMULATOR = Path(__file__).parents[1] / "maxmoe/libmaxmoe_cuda_emulator.so"


@pytest.fixture
def num_threads() -> int:
    """One thread: at most sizes of tests, more threads would only wait for each other."""
    return 1


@pytest.fixture(autouse=True)
def fresh_state(num_threads: int) -> Iterator[None]:
    """Seeds, and undoes what a test changes for the whole process."""
    # torch.manual_seed notes the stack for every kind of device that has not been used, 0.6 ms in each test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(params=["cpu", "aten"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The two implementations of every operator: our CPU kernels, and ATen calls as on other devices."""
    with implementation(request.param):
        yield request.param


@pytest.fixture(params=["cpu", "aten", pytest.param("cuda", marks=pytest.mark.slow)])
def every_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """These two, and the CUDA kernels in their emulator: by default in the tests that support/paths.py marks."""
    if request.param == "cuda" and not EMULATOR.exists():
        pytest.skip("the emulator of CUDA is built with the C++ tests (MAXMOE_BUILD_TESTS), wheels have none")
    with implementation(request.param):
        yield request.param


@contextmanager
def implementation(path: str) -> Iterator[None]:
    """The operators use a path. New memory is filled with NaN, so that uninitialized memory shows in results."""
    from maxmoe import ops

    torch.use_deterministic_algorithms(True)
    with ops.force_cuda_emulator() if path == "cuda" else ops.force_aten(path == "aten"):
        yield
    torch.use_deterministic_algorithms(False)
