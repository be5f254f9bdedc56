"""What every test starts from: the same random numbers and the same number of threads."""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# OpenMP threads that wait for each other would spin on the processor that the other test process needs. libgomp reads
# the variable when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

if TYPE_CHECKING:
    from support.python_with_torch import Python

pytest.register_assert_rewrite("support")

FOLDERS_OF_RANKS = ("dispatch", "optim", "parallel", "pipelining", "planning", "sharding", "testing")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been made
def pytest_configure(config: pytest.Config) -> None:
    from support.time_left import TimeLeft
    from support.waiting import Waiting

    if config.pluginmanager.has_plugin("terminalreporter") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimeLeft(config))
    config.pluginmanager.register(Waiting())
    # The autograd engine creates one thread per device in the first backward of a process. With a CUDA build of torch
    # and no GPU, a fake tensor registers one device. A first backward after that, such as the one of a compiled
    # function, would start a thread, and the ranks that a later test forks could not run a backward.
    torch.ones((), requires_grad=True).backward()
    # For the ranks that are forked: a thread that wakes up does not interrupt the one that wakes it. Gloo wakes its
    # thread for messages while it holds the lock that this thread needs, which would ask for it again and again.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run all cases of tests marked sampled, not some of each"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and take a sample of costly cases.

    The file that takes longest is first, since nothing else could run beside its end. Those that fork ranks are next: a
    fork copies page tables, which grow with what other tests import.
    """
    from support.sampling import left_out

    items.sort(key=lambda item: (item.path.name != "test_cpp.py", item.path.parent.name not in FOLDERS_OF_RANKS))
    if config.getoption("exhaustive") or any("::" in argument for argument in config.args):  # asked for by name
        return
    others = left_out(items)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all objects that exist now from garbage collection, collect others more rarely, and prepare for forks.

    Every full collection would visit the objects of all modules and tests, and in a fork copy the pages they are on.
    Collections of young objects after 700 allocations each take a tenth of the time of compiled functions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    if sum(item.path.parent.name in FOLDERS_OF_RANKS for item in session.items) > 20:  # it takes half a second
        from support.huge_pages import use_huge_pages

        use_huge_pages()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Python]":
    """Runs code in a fork of a process that has imported torch and nothing of maxmoe."""
    from support.python_with_torch import python_with_torch

    with python_with_torch(tmp_path_factory.mktemp("python")) as run:
        yield run


@pytest.fixture
def num_threads() -> int:
    """One: at most sizes more only wait for each other, on a busy machine most of the time."""
    return 1


@pytest.fixture(autouse=True)
def fresh_state(num_threads: int) -> Iterator[None]:
    """Seeds, and undoes what a test changes for the whole process."""
    # torch.manual_seed notes the stack for every kind of device that has not been used, 0.6 ms in each test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", "aten"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The two implementations of every operator: our CPU kernels, and ATen calls as on other devices.

    New memory is filled with NaN, so that a value which nobody wrote does not look like a zero.
    """
    from maxmoe import ops

    torch.use_deterministic_algorithms(True)
    with ops.force_aten(request.param == "aten"):
        yield request.param
    torch.use_deterministic_algorithms(False)
