"""Calls of every registered operator with one or two arguments that are wrong, on both paths.

A call must either raise an error that names the operator, or give the same results on both paths.
"""

import random
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from maxmoe import _C, ops
from maxmoe.quantization import quantize
from ops.test_core_module import calls, moved
from support.operator_checks import ExecutedOperators
from support.run_ranks import run_ranks

HUGE = (-(2**63), -(2**62), -1, 0, 1, 3, 10**9, 2**32, 2**62, 2**63 - 1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
# Errors of torch itself for arguments that the schema does not allow, or for sizes that no tensor may have.
OF_TORCH = "Expected a value of type|fixed-size array|too large|overflow|negative dimension|allocate memory|bad_alloc"
MEMORY = 2**31  # bytes that the process may ask for
# The operators that an operator without a kernel calls: errors name one of them.
COMPOSED_OF = {"routed_experts": "(linear|route|ragged_plan|expert_ffn|routed_experts)"}
SAMPLE = 16  # calls of each operator in each way

Arguments = dict[str, Any]


def valid_calls() -> Iterator[tuple[str, Arguments]]:
    """Yield the calls of operators that functions of maxmoe._C and their backward make: 5 tokens, 3 experts."""
    given = calls()
    given["ragged_plan"]["num_rows"] = None  # which must be exact on the CPU alone
    ffn, stack = given["expert_ffn"], given["gmm"]["rhs"]
    frozen = {"gate": stack, "up": stack, "down": quantize(torch.randn(3, 6, 4), "mxfp4")}
    more = [("gmm", given["gmm"] | {"rhs": ffn["up"]}), ("expert_ffn", ffn | frozen)]
    with ExecutedOperators() as executed:
        for name, arguments in [*given.items(), *more]:
            out = getattr(_C, name)(**{key: moved(value, trained) for key, value in arguments.items()})
            roots = [each.sum() for each in (out if isinstance(out, tuple) else (out,)) if is_trained(each)]
            torch.autograd.backward(roots)
    distinct: dict[tuple[str, bool], Arguments] = {}  # dense or quantized, with most arguments
    for name, arguments in sorted(executed.calls, key=lambda call: len(call[1])):
        distinct[name, any(key.endswith("_format") for key in arguments)] = arguments
    for (name, _), arguments in distinct.items():
        full = {each.name: detached(arguments.get(each.name, each.default_value)) for each in schema(name)}
        if name == "expert_ffn_backward":  # kernels and ATen order the preactivations differently
            full["preactivations"] = torch.full_like(full["preactivations"], 0.5)
        yield name, full
        if name == "expert_ffn_forward":
            yield "expert_ffn", full
    routed = {"x": ffn["x"], "router": torch.randn(3, 4)}
    matrices = {"gate": torch.randn(3, 4, 6), "up": torch.randn(3, 4, 6), "down": torch.randn(3, 6, 4)}
    rules = {
        name: value
        for name, value in (given["route"] | ffn).items()
        if name in {each.name for each in schema("routed_experts")}
    }
    yield (
        "routed_experts",
        {each.name: each.default_value for each in schema("routed_experts")} | rules | routed | matrices,
    )


def schema(operator: str) -> list[Any]:
    return getattr(torch.ops.maxmoe, operator).default._schema.arguments


def trained(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.dtype.itemsize > 1)


def is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def registered_operators() -> set[str]:
    """The operators in C++: an operator in Python cannot read beyond a tensor."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("maxmoe::")}
    return {name.removeprefix("maxmoe::") for name in names - set(torch._library.custom_ops.OPDEFS)}


def hostile_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor with another dtype, rank, size, layout or device, and with other values."""
    yield from (tensor.to(dtype) for dtype in DTYPES if dtype != tensor.dtype)
    yield from (tensor.unsqueeze(0), tensor.flatten(), tensor[0], tensor.new_zeros(()))
    for dim in range(tensor.dim()):
        if tensor.shape[dim] == 0:
            yield tensor.new_zeros([3 if other == dim else size for other, size in enumerate(tensor.shape)])
            continue
        yield tensor.narrow(dim, 0, tensor.shape[dim] - 1)
        yield tensor.narrow(dim, 0, 0)
        yield torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        yield tensor.narrow(dim, 0, 1).expand_as(tensor)
        if dim > 0:
            yield tensor.transpose(0, dim)
            yield tensor.transpose(0, dim).contiguous().transpose(0, dim)
    yield torch.empty_like(tensor, device="meta")
    yield tensor.to_sparse()
    yield tensor.new_zeros(1).expand(2**40, *tensor.shape[1:])
    yield tensor.new_zeros((2**40, 0))
    if tensor.is_floating_point():
        yield from (torch.full_like(tensor, value) for value in (float("nan"), float("inf"), -1e3))
    elif tensor.dtype == torch.int64:
        yield from (tensor.clone().index_fill_(0, torch.tensor(0), value) for value in HUGE)
        yield from (torch.full_like(tensor, value) for value in HUGE)


def hostile_values(value: Any) -> Iterator[Any]:
    yield None
    if isinstance(value, Tensor):
        yield from hostile_tensors(value)
    elif isinstance(value, list):
        yield from ([False] * len(value), value[1:], [])
    elif isinstance(value, str):
        yield from ("", "nonsense", "identity", "none", "relu2", "int4", "int8", "nf4", "fp8_block")
    elif isinstance(value, torch.dtype):
        yield from (dtype for dtype in (*DTYPES, torch.complex64, torch.float8_e4m3fn) if dtype != value)
    elif isinstance(value, float):
        yield from (0.0, -1.0, 1e300, float("nan"), float("inf"))
    elif isinstance(value, int) or value is None:
        yield from (*HUGE, "interleaved", "concatenated", "nonsense", "mxfp4")


def changes_of(arguments: Arguments) -> list[Arguments]:
    """Return changes of one argument, and of two."""
    single = [{name: value} for name, valid in arguments.items() for value in hostile_values(valid)]
    generator = random.Random(0)
    pairs = [generator.sample(single, 2) for _ in range(SAMPLE // 4)]
    return [*generator.sample(single, min(SAMPLE, len(single))), *(first | second for first, second in pairs)]


def fresh(value: Any) -> Any:
    """Copy a tensor, because a call may overwrite it."""
    return value.clone() if isinstance(value, Tensor) and value.numel() < 1000 else value


def outcome(operator: str, arguments: Arguments, force: bool, wrap: Callable[..., Any]) -> tuple[Tensor, ...] | str:
    """Return the results, or the error if its message is good enough."""
    arguments = {name: fresh(value) for name, value in arguments.items()}
    try:
        with ops.force_aten(force):
            result = wrap(getattr(torch.ops.maxmoe, operator))(**arguments)
    except (ValueError, RuntimeError, TypeError, MemoryError) as error:
        asked = operator.removesuffix("_forward")
        named = f"maxmoe::{COMPOSED_OF.get(asked, asked)}"
        if not re.search(f"{named}|{OF_TORCH}", str(error)):
            raise AssertionError(f"the error does not name the operator: {error}") from error
        return str(error)
    return result if isinstance(result, tuple) else (result,)


def with_gradients(function: Any) -> Callable[..., Any]:
    """Forward and backward, the results and all gradients."""

    def run(**arguments: Any) -> tuple[Tensor, ...]:
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() and tensor.is_leaf]
        out = function(**arguments)
        outputs = out if isinstance(out, tuple) else (out,)
        roots = [output.sum() for output in outputs if output.requires_grad]
        gradients = torch.autograd.grad(roots, leaves, allow_unused=True) if roots else ()
        return (*(output.detach() for output in outputs), *(g for g in gradients if g is not None))

    return run


WAYS: dict[str, Callable[..., Any]] = {
    "without gradients": torch.no_grad(),
    "with gradients": with_gradients,
    "inference": torch.inference_mode(),
    "autocast": lambda function: torch.autocast("cpu", dtype=torch.bfloat16)(torch.no_grad()(function)),
}


def check(operator: str, arguments: Arguments, change: Arguments, way: Callable[..., Any]) -> None:
    kernel, aten = (outcome(operator, arguments | change, force, way) for force in (False, True))
    if isinstance(kernel, str) or isinstance(aten, str):
        # On other devices a plan with rows of no expert is valid, because the host does not wait for the sizes. The
        # slots of these rows are -1.
        may_differ = re.search(
            "memory|bad_alloc|group_sizes must sum to|plan.slots must be in .*, got -1\\b", f"{kernel} {aten}"
        )
        assert may_differ or isinstance(kernel, str) == isinstance(aten, str), f"{kernel} {aten}"
        return
    if {"slots", "rows", "row_of_slot"} & set(change) and "top_k" in arguments:
        return  # a plan that contradicts itself gives wrong rows, never a read out of bounds
    if operator == "expert_ffn_forward":  # kernels and ATen order the preactivations differently
        kernel, aten = ((out, z.flatten().sort().values, *others) for out, z, *others in (kernel, aten))
    for ours, other in zip(kernel, aten, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (other.shape, other.dtype, other.device), f"{ours} {other}"
        if ours.numel() and ours.device.type != "meta" and other.isfinite().all():
            error = (ours.double() - other.double()).abs().max()
            assert error <= 0.05 * other.double().abs().max() + 1e-3, f"error {error} of {other.abs().max()}"


def check_saved_tensors(operator: str, arguments: Arguments) -> None:
    """Check the backward with saved tensors that a hook has replaced: an error or any number, but no crash."""
    generator = random.Random(0)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor.detach())
        return len(saved) - 1

    def run(unpack: Callable[[int], Tensor]) -> None:
        saved.clear()
        with saved_tensors_hooks(pack, unpack):
            with_gradients(getattr(torch.ops.maxmoe, operator))(**{k: fresh(v) for k, v in arguments.items()})

    run(lambda number: saved[number])
    for number, tensor in enumerate(list(saved)):
        variants = list(hostile_tensors(tensor))
        for variant in generator.sample(variants, min(len(variants), SAMPLE // 8)):
            announce(operator, "saved", {str(number): variant})
            with suppress(ValueError, RuntimeError, IndexError, MemoryError):
                run(lambda n, number=number, variant=variant: variant if n == number else saved[n])


def announce(operator: str, way: str, change: Arguments) -> None:
    """Print the call, so that the last line names the one that crashed."""
    print(operator, way, {name: short(value) for name, value in change.items()}, flush=True)


def short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} {value.stride() if value.layout == torch.strided else ''} {value.device}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # uninitialized memory is NaN
    warnings.simplefilter("ignore")
    calls = list(valid_calls())
    operators = {operator for operator, _ in calls}
    assert operators == registered_operators(), operators ^ registered_operators()
    for operator, arguments in calls:
        for name, way in WAYS.items():
            if way is with_gradients and operator.endswith(("_forward", "_backward")):
                continue
            for change in changes_of(arguments):
                announce(operator, name, change)
                check(operator, arguments, change, way)
        if not operator.endswith(("_forward", "_backward", "_plan", "dequantize")):
            check_saved_tensors(operator, arguments)


def test_hostile_calls() -> None:
    """In a fork, which may crash: the last line that it has printed names the call."""
    run_ranks(main, 1, deadline=300)
