"""Memory of one contender, measured in a new process: `python -m benchmarks.peak REQUEST`, started by the parent.

The process first computes a small problem, so that code, threads and tables are loaded. Then it reads its resident
memory, computes, and reads the peak (VmHWM). The allocator is set to map every buffer of 64 KiB or more separately and
to unmap it when it is freed, so that the peak contains live buffers only. Freed pages that the system may reclaim at
any time (LazyFree in /proc/self/smaps_rollup) are resident, but count as free.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternatives import contenders
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.alternatives.peft_experts import adapter_contenders
from benchmarks.contender import AutogradContender, Contender, Mode
from benchmarks.problem import make_problem
from benchmarks.results import Case
from benchmarks.shapes import Shape

WARM_UP = Shape(num_tokens=8, hidden_size=64, intermediate_size=64, num_experts=4, top_k=2)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure_apart(
    contender: str, case: Case, threads: int, local_experts: tuple[int, int] | None = None
) -> tuple[dict[str, float], str | None]:
    """Measure in a new process.

    Args:
        contender: name of the contender.
        case: shape, dtype and mode.
        threads: number of threads.
        local_experts: maxmoe only: number of experts to compute and the first one; None for all.

    Returns:
        Numbers by name, and the error if there are none.
    """
    request = [contender, list(case.shape), case.dtype_name, case.mode, threads, local_experts]
    command = [sys.executable, "-m", "benchmarks.peak", json.dumps(request)]
    root = Path(__file__).parent.parent
    worker = subprocess.run(command, env=os.environ | ALLOCATOR, cwd=root, capture_output=True, text=True, check=False)
    if worker.returncode != 0:
        lines = worker.stderr.strip().splitlines() or [f"ended with status {worker.returncode}"]
        return {}, lines[-1]
    return json.loads(worker.stdout.splitlines()[-1]), None


def answer(request: str) -> dict[str, float]:
    """The main function of the new process."""
    name, sizes, dtype_name, mode, threads, local_experts = json.loads(request)
    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)

    def prepared(shape: Shape, local: tuple[int, int] | None) -> Contender:
        everybody = [MaxmoeExperts(*local)] if local else [*contenders(), *adapter_contenders()]
        contender = next(each for each in everybody if each.name == name)
        contender.prepare(make_problem(shape, dtype))
        return contender

    run(prepared(WARM_UP, None), mode)
    contender = prepared(Shape(*sizes), local_experts)
    numbers = peak(contender, mode)
    if mode == "forward+backward" and isinstance(contender, AutogradContender):
        numbers |= saved_for_backward(contender)
    return numbers


def run(contender: Contender, mode: Mode) -> list[Any]:
    """Compute once; all tensors that come out."""
    if mode != "forward+backward":
        return [contender.forward()]
    output, gradients = contender.step()
    return [output, *gradients]


def peak(contender: Contender, mode: Mode) -> dict[str, float]:
    """Bytes of the peak above the state before, of the results, of the rest, and of memory that remains."""
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    before = status("RssAnon")
    returned = run(contender, mode)
    # Pages of files are code that the small problem did not need.
    highest = status("VmHWM") - status("RssFile") - status("RssShmem")
    bytes_returned = sum(tensor.nbytes for tensor in returned)
    del returned
    settle()
    kept = max(status("RssAnon") - status("LazyFree", "smaps_rollup") - before, 0)
    above = highest - before
    return {"peak": above, "returned": bytes_returned, "buffers": above - bytes_returned, "kept": kept}


def settle() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str, file: str = "status") -> int:
    """A line of /proc/self/status or of another file there, in bytes."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def saved_for_backward(contender: AutogradContender) -> dict[str, float]:
    """Bytes that the graph keeps alive: whole storages, each once, parameters left out."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = contender.compute()
    for parameter in contender.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    routing = contender.leaves["weights"].untyped_storage().data_ptr()
    is_row = {key: tensor.is_floating_point() and key != routing for key, tensor in kept.items()}
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}
    del output
    return {
        "saved": sum(size for key, size in sizes.items() if is_row[key]),
        "saved_indices": sum(size for key, size in sizes.items() if not is_row[key]),
    }


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1])))
