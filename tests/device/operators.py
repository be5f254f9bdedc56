"""Operators on a device: errors, the same bits twice, another stream, refused arguments.

    python -m device.operators --device cuda --out results.json

Every operator is compared with the specification in float64 (`maxmoe.reference`), with the calls of tests/ops; plan and
experts at larger sizes with the kernels of the CPU in float64.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maxmoe
from benchmarks.shapes import Shape as Sizes
from device import experts
from device.cases import Cases, Values, main, rounded, within
from maxmoe import build_info, ops
from support.operator_calls import Call, Result, cotangents_of, expected_result, result, tolerance
from support.operator_checks import AutogradTests
from support.shapes import DTYPES, EMPTY_EXPERTS, NO_TOKEN, ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, UNROUTED

TESTS = Path(__file__).parents[1]
SHAPES = [SKEWED, ODD_WIDTHS, EMPTY_EXPERTS, UNROUTED, NO_TOKEN, SEVERAL_BLOCKS]
# T, D, F, E, K. The products of the second and the fourth are larger than the tiles of the kernels.
SIZES = [Sizes(64, 64, 48, 8, 2), Sizes(129, 72, 40, 16, 4), Sizes(1, 64, 32, 4, 4), Sizes(300, 256, 96, 128, 8)]
# Relative to the norm. In 16 bits preactivations, activations and rows are rounded.
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WAITLESS = Sizes(300, 256, 96, 16, 4)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operator_tests() -> Iterator[tuple[str, AutogradTests]]:
    """Yield the classes of tests/ops that say how an operator is called, and the file that holds each."""
    for path in sorted((TESTS / "ops").glob("test_*.py")):
        module = importlib.import_module(f"ops.{path.stem}")
        for kind in vars(module).values():
            is_class = isinstance(kind, type) and issubclass(kind, AutogradTests)
            if is_class and kind.__module__ == module.__name__:
                yield f"{path.stem.removeprefix('test_')}, {kind.__name__.removeprefix('Test')}", kind()


def moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or the tensors in a named tuple, on the device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(*(moved(each, device) for each in value)) if isinstance(value, tuple) else value


def result_on(device: torch.device, call: Call) -> Result:
    """Return outputs and gradients of a call whose arguments are on the CPU, run on the device."""
    call = Call(call.operator, {name: moved(value, device) for name, value in call.arguments.items()})
    with torch.no_grad():
        cotangents = [cotangent.to(device) for cotangent in cotangents_of(call())]
    return result(call, cotangents=cotangents)


def tensors_of(results: Result) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in results.by_name().items() if tensor is not None}


def operator_errors(cases: Cases, tests: AutogradTests, dtype: torch.dtype) -> Values:
    """Compare an operator with the specification; the error is relative to the largest value of a tensor."""
    errors, same_bits = {}, True
    for shape in SHAPES[:2] if cases.is_tiny else SHAPES:
        torch.manual_seed(0)
        call = tests.call(shape).cast(dtype)
        got, again = (tensors_of(result_on(cases.device, call)) for _ in range(2))
        same_bits &= all(torch.equal(again[name], tensor) for name, tensor in got.items())
        for name, value in tensors_of(expected_result(call)).items():
            if name in got or value.any():  # no gradient stands for zeros
                errors[f"{shape}: {name}"] = largest_error(got[name].cpu(), value)
    worst = max(errors, key=lambda name: errors[name])
    limit = tolerance(dtype, tests.roundings)
    values = {"error": errors[worst], "tensor": worst, "limit": limit, "same_bits": same_bits}
    return {"operator": tests.call(SKEWED).operator, "dtype": name_of(dtype), **values} | {
        "ok": same_bits and errors[worst] <= limit
    }


def largest_error(got: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0 if got.shape == expected.shape else float("inf")
    error = float((got.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return rounded(error) if error == error else float("inf")


def experts_errors(cases: Cases, sizes: Sizes, dtype: torch.dtype, skew: float) -> Values:
    """Compare plan and experts with the CPU in float64."""
    problem = experts.draw(sizes, dtype, cases.device, skew)
    got, again = (experts.ours(problem, backward=True) for _ in range(2))
    values = within(LIMITS[dtype], got, experts.ours(problem.to_host(), backward=True))
    same_bits = all(torch.equal(again[name], tensor) for name, tensor in got.items())
    return {"dtype": name_of(dtype), **values, "same_bits": same_bits, "ok": values["ok"] and same_bits}


def side_stream(cases: Cases) -> Values:
    """Run on a stream that is not the current one of the process."""
    problem = experts.draw(WAITLESS, torch.bfloat16, cases.device)
    expected = experts.ours(problem, backward=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = experts.ours(problem, backward=True)
    torch.cuda.current_stream().wait_stream(stream)
    return {"ok": all(torch.equal(got[name], tensor) for name, tensor in expected.items())}


def two_devices(cases: Cases) -> Values:
    """Tokens on the device, weights elsewhere: an error that names the operator."""
    other = torch.device("cpu" if cases.is_cuda else "meta")
    sizes = torch.tensor([2, 1], device=cases.device)
    try:
        ops.gmm(torch.randn(3, 4, device=cases.device), torch.randn(2, 4, 5, device=other), sizes)
    except (RuntimeError, ValueError) as error:
        return {"message": str(error).splitlines()[0], "ok": "maxmoe::gmm" in str(error)}
    return {"ok": False, "message": "no error"}


WRONG_EXPERT = """
import torch
from maxmoe import ops
ops.ragged_plan(torch.tensor([[0, 99]], device="{device}"), 2, num_rows=2)
if "{device}" != "cpu":
    torch.cuda.synchronize()
"""


def wrong_value(cases: Cases) -> Values:
    """An expert id out of range: on a GPU an assertion of the device, which ends the use of it in that process."""
    code = WRONG_EXPERT.format(device=cases.device)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    named = "device-side assert" if cases.is_cuda else "maxmoe::ragged_plan"
    return {"exit_code": done.returncode, "message": said[-500:], "ok": done.returncode != 0 and named in said}


def check_results(cases: Cases, suffix: str) -> None:
    """Check the operators with one implementation."""
    for name, tests in operator_tests():
        for dtype in [torch.float32] if cases.is_tiny else DTYPES:
            cases.run(f"operators{suffix}", f"{name}, {name_of(dtype)}", operator_errors, tests, dtype)
    for dtype in [torch.float32] if cases.is_tiny else LIMITS:
        for sizes in SIZES[:1] if cases.is_tiny else SIZES:
            for skew in (0.0, 0.5):
                name = f"{name_of(dtype)}, {tuple(sizes)}, skew {skew}"
                cases.run(f"experts{suffix}", name, experts_errors, sizes, dtype, skew)


def implementations(cases: Cases) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """Yield a suffix of group names and a context, for the default implementation and for another one.

    The other one is ATen on a GPU with CUDA kernels, and on the CPU these kernels in the emulator, if it is built.
    """
    yield "", nullcontext
    if cases.is_cuda and build_info()["cuda_kernels"] == "usable":
        yield ", through ATen", ops.force_aten
    if not cases.is_cuda and Path(maxmoe.__file__).with_name("libmaxmoe_cuda_emulator.so").exists():
        yield ", CUDA kernels in the emulator", ops.force_cuda_emulator


def check(cases: Cases) -> None:
    """Check the operators."""
    for suffix, implementation in implementations(cases):
        with implementation():
            check_results(cases, suffix)
    if cases.is_cuda:
        cases.run("device", "experts, on another stream", side_stream)
    cases.run("device", "tensors on two devices are refused", two_devices)
    if not cases.is_tiny:
        cases.run("device", "an expert id out of range is an error", wrong_value)


if __name__ == "__main__":
    main("operators", check)
