"""Large results lie in huge pages that are used again when they are freed."""

import json
import multiprocessing
import os
import random
import re
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

import maxmoe
from maxmoe import _C, ops
from support import programs

MIB = 2**20
HUGE_PAGE = 2 * MIB
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is kept on Linux")


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    maxmoe.empty_cache()
    yield
    maxmoe.empty_cache()


def large_result(num_bytes: int, value: int = 1) -> Tensor:
    """The result of an operator: float32 [num_bytes / 1024, 256]."""
    row = torch.full((1, 256), float(value))
    return ops.ragged_gather(row, torch.zeros(num_bytes // 1024, dtype=torch.int64))


def in_new_process(code: str, **environment: str) -> str:
    tests = Path(__file__).parents[1]
    done = programs.python(f"from ops import test_memory; {code}", cwd=tests, env=os.environ | environment)
    return programs.printed(done)


def kept() -> int:
    return _C.memory_reserved() - _C.memory_allocated()


def smaps(tensor: Tensor) -> str:
    """The fields of /proc/self/smaps for the mapping that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= middle < end:
            return mapping
    raise AssertionError(f"no mapping holds {middle:x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)
@pytest.mark.parametrize("size", [MIB, 33 * MIB])
def test_large_results_ask_for_huge_pages(size: int) -> None:
    rows = torch.ones(size // 1024, 256)
    plan = ops.ragged_plan(torch.zeros(len(rows), 1, dtype=torch.int64), 1)
    results = [
        large_result(size),
        ops.ragged_sort(rows, plan),
        ops.gmm(rows, torch.ones(1, 256, 256), plan.group_sizes),
    ]
    for result in results:
        assert result.data_ptr() % HUGE_PAGE == 0
        assert re.search(r"VmFlags:.*\bhg\b", smaps(result))


def test_the_system_may_take_what_is_kept() -> None:
    tensor = large_result(16 * MIB)
    lazy_free = re.compile(r"^LazyFree:\s*(\d+) kB", re.MULTILINE)
    (before,) = lazy_free.findall(Path("/proc/self/smaps_rollup").read_text())
    del tensor
    (after,) = lazy_free.findall(Path("/proc/self/smaps_rollup").read_text())
    assert (int(after) - int(before)) * 1024 == 16 * MIB


def marked_block(num_bytes: int, mark: int) -> Tensor:
    """A storage of any size, of which one number in each page of 4 KiB is written."""
    storage = large_result(4 * MIB).untyped_storage()
    storage.resize_(0)
    storage.resize_(num_bytes)
    return torch.empty(0).set_(storage)[::1024].fill_(mark)


def test_no_more_is_mapped_than_was_allocated_at_once() -> None:
    """A random sequence of allocations, also if freed pages are not contiguous; blocks never overlap."""
    chooser = random.Random(0)
    before = _C.memory_allocated()
    blocks: dict[int, Tensor] = {}
    most = 0
    for mark in range(150):
        if chooser.random() < 0.52 or not blocks:
            most = max(most, _C.memory_allocated() + 4 * MIB)  # marked_block starts with a small one
            blocks[mark] = marked_block(chooser.randint(MIB, 20 * MIB), mark)
        else:
            freed = chooser.choice(list(blocks))
            assert (blocks.pop(freed) == freed).all()
        most = max(most, _C.memory_allocated())
        assert _C.memory_reserved() <= most
    blocks.clear()
    assert _C.memory_allocated() == before


def faults_of_steps(num_tokens: int) -> list[int]:
    """Page faults of eight training steps whose gradients are 54 huge pages."""
    torch.set_num_threads(1)
    config = maxmoe.MoEConfig(hidden_size=256, intermediate_size=768, num_experts=48, top_k=2)
    layer, x = maxmoe.MoE(config), torch.randn(num_tokens, 256)

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        layer.zero_grad()
        layer(x).hidden_states.sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return [step() for _ in range(8)]


def test_recomputed_preactivations_take_no_other_memory() -> None:
    """The preactivations [R, 2F] take 8 MiB; the outputs of the experts, [R, D], 32 MiB, are not recomputed."""
    T, K, E, D, F = 2048, 2, 4, 2048, 256
    x, weights = torch.randn(T, D), torch.rand(T, K, requires_grad=True)
    plan = ops.ragged_plan(torch.arange(T * K).view(T, K) % E, E)
    gate, up, down = torch.randn(E, D, F), torch.randn(E, D, F), torch.randn(E, F, D)
    out = ops.expert_ffn(x, weights, plan, gate, up, down, recompute=True)
    grad_out = torch.ones_like(out)
    maxmoe.empty_cache()
    before = _C.memory_reserved()
    out.backward(grad_out)
    assert _C.memory_reserved() - before == 4 * T * K * 2 * F == 8 * MIB


def test_storages_are_resized_viewed_and_shared() -> None:
    tensor = large_result(8 * MIB)
    tensor.resize_(16 * 1024, 256)
    assert torch.equal(tensor[: 8 * 1024], torch.ones(8 * 1024, 256))
    last_row = tensor.fill_(3)[-1]
    address = tensor.data_ptr()
    del tensor
    assert large_result(16 * MIB).data_ptr() != address  # a view keeps it
    assert torch.equal(last_row, torch.full((256,), 3.0))
    last_row.untyped_storage().resize_(0)
    assert _C.memory_allocated() == 0


def test_tensors_shared_between_processes_keep_their_values() -> None:
    tensor = large_result(8 * MIB, value=4)
    tensor.share_memory_()
    assert kept() == 8 * MIB
    large_result(8 * MIB, value=5)
    assert torch.equal(tensor, torch.full_like(tensor, 4))


def test_threads_allocate_and_free_each_others_tensors() -> None:
    def work(mine: Tensor, value: int) -> bool:
        del mine
        return all(bool((large_result(4 * MIB + value * MIB, value) == value).all()) for _ in range(8))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, [large_result(4 * MIB) for _ in range(8)], range(8)))


def fill_in_child(shared: Tensor) -> None:
    own = large_result(8 * MIB, value=7)
    maxmoe.empty_cache()
    shared.fill_(float(own.mean()))


def fork() -> None:
    """Fork a process that has one thread."""
    assert len(os.listdir("/proc/self/task")) == 1
    alive, shared = large_result(8 * MIB, value=1), torch.zeros(1).share_memory_()
    large_result(8 * MIB, value=2)  # kept by both
    child = multiprocessing.get_context("fork").Process(target=fill_in_child, args=(shared,))
    child.start()
    own = large_result(8 * MIB, value=3)
    child.join()
    assert child.exitcode == 0
    assert shared == 7
    assert torch.equal(own, torch.full_like(own, 3))
    assert torch.equal(alive, torch.ones_like(alive))


def test_a_forked_process_has_memory_of_its_own_and_a_training_step_maps_none_anew() -> None:
    """The C library would map each huge page anew. In a new process: in a used heap other page faults occur."""
    code = "test_memory.fork(); print(test_memory.faults_of_steps(num_tokens=512))"
    faults = json.loads(in_new_process(code, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"))
    assert min(faults[3:]) < 16, faults


@pytest.mark.filterwarnings("ignore:.*profiler.*")
def test_the_profiler_sees_large_results() -> None:
    index = torch.zeros(8 * 1024, dtype=torch.int64)
    row = torch.ones(1, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ops.ragged_gather(row, index)
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert 8 * MIB in sizes
    assert -8 * MIB in sizes


def test_memory_is_filled_where_torch_is_asked_to() -> None:
    """Results are filled like torch.empty, which shows elements that a kernel does not write."""
    before = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        tensor = large_result(8 * MIB)
        tensor.resize_(16 * 1024, 256)
    finally:
        deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)
    assert tensor[8 * 1024 :].isnan().all()
