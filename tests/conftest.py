"""The initial state of every test: the same random numbers and the same number of threads."""

import gc
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

pytest.register_assert_rewrite("support")

EMULATOR = Path(__file__).parents[1] / "maxmoe/libmaxmoe_cuda_emulator.so"


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been made
def pytest_configure(config: pytest.Config) -> None:
    from support.not_run import NotRun
    from support.time_left import TimeLeft

    # Collections of young objects after 700 allocations each take a tenth of the time of imports and of compiled
    # functions.
    gc.set_threshold(100_000, 50, 1000)
    if config.pluginmanager.has_plugin("terminalreporter") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeLeft(config))
        config.pluginmanager.register(NotRun(), "not run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the file that takes longest first, since nothing else could run beside its end, and sample costly cases."""
    from support.not_run import LEFT_OUT
    from support.sampling import left_out

    items.sort(key=lambda item: item.path.name != "test_cpp.py")
    if not config.option.markexpr:
        return
    others = left_out(items)
    config.hook.pytest_deselected(items=others)
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist
        config.workeroutput[LEFT_OUT] = len(others)
    elif plugin := config.pluginmanager.get_plugin("not run"):
        plugin.num_left_out = len(others)
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all objects of modules and tests from garbage collection: every full collection would visit them."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    from support.bounded import bounded

    with bounded():
        return (yield)


@pytest.fixture
def num_threads() -> int:
    """One thread: at most sizes of tests, more threads would only wait for each other."""
    return 1


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The fixture of pytest. Ranks have its attributes too."""
    from support.call_in_fork import monkeypatches

    monkeypatches.append(monkeypatch)
    yield monkeypatch
    monkeypatches.remove(monkeypatch)


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
