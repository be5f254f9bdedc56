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

from maxmoe import ops
from maxmoe.quantization import quantize
from support.call_in_fork import call_in_fork

HUGE = (-(2**63), -(2**62), -1, 0, 1, 3, 10**9, 2**32, 2**62, 2**63 - 1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
# Errors of torch itself for arguments that the schema does not allow, or for sizes that no tensor may have.
OF_TORCH = "Expected a value of type|fixed-size array|too large|overflow|negative dimension|allocate memory|bad_alloc"
MEMORY = 2**31  # bytes that the process may ask for
# The operators that an operator without a kernel calls: errors name one of them.
COMPOSED_OF = {"routed_experts": "(linear|route|ragged_plan|expert_ffn|routed_experts)"}
SAMPLE = 24  # calls of each operator in each way

Arguments = dict[str, Any]


def valid_calls() -> Iterator[tuple[str, Arguments]]:
    """Yield at least one call of each operator: 5 tokens, 2 experts each out of 3, D = 4, F = 6."""
    experts = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])
    plan = ops.ragged_plan(experts, 3)
    yield from calls_of_experts(plan)
    yield from calls_of_products(plan)
    yield from calls_of_routing(experts)
    yield from calls_of_movement(plan)


def calls_of_experts(plan: ops.RaggedPlan) -> Iterator[tuple[str, Arguments]]:
    ffn: Arguments = {"x": torch.randn(5, 4), "weights": torch.rand(5, 2), "slots": plan.slots, "rows": plan.rows}
    ffn |= {"group_sizes": plan.group_sizes, "top_k": 2, "gate": torch.randn(3, 4, 6), "up": torch.randn(3, 4, 6)}
    ffn |= {"down": torch.randn(3, 6, 4), "gate_bias": torch.randn(3, 6), "up_bias": torch.randn(3, 6)}
    ffn |= {"down_bias": torch.randn(3, 4), "fused_gate": None, "recompute": False, **activation_arguments()}
    for name in ("gate", "up", "down"):
        count, inner, outer = ffn[name].shape
        ffn |= {f"{name}_a": torch.randn(count, inner, 2), f"{name}_b": torch.randn(count, 2, outer)}
    before = {"grad_out": torch.randn(5, 4), "preactivations": torch.full((10, 12), 0.5), "reduced": torch.randn(10, 6)}
    before |= {"gate_preactivations": torch.randn(10, 0), "output_mask": [True] * 14}
    yield "expert_ffn", ffn
    routed = {"x": ffn["x"], "router": torch.randn(3, 4), "router_bias": None, "recompute": False}
    names = [f"{name}{end}" for name in ("gate", "up", "down") for end in ("", "_bias")]
    yield "routed_experts", routing_rules() | routed | {name: ffn[name] for name in names} | activation_arguments()
    yield "expert_ffn_forward", ffn
    yield "expert_ffn_backward", before | ffn
    codes = {name: quantize(ffn[name], "mxfp4") for name in ("gate", "up", "down")}
    frozen = ffn | {name: stack.codes for name, stack in codes.items()}
    frozen |= {f"{name}_scales": stack.scales for name, stack in codes.items()}
    frozen |= {f"{name}_zeros": None for name in codes} | {f"{name}_format": "mxfp4" for name in codes}
    frozen |= {f"{name}_columns": stack.columns for name, stack in codes.items()}
    frozen |= {f"{name}_is_transposed": True for name in codes}
    yield "expert_ffn", frozen
    yield "expert_ffn_forward", frozen
    mask = [True, True, *[False, True, True, True] * 3]
    yield "expert_ffn_backward", before | frozen | {"output_mask": mask}


def activation_arguments() -> Arguments:
    return {"activation": "silu", "limit": 1.0, "limit_target": "input", "gate_softcap": None, "up_softcap": None}


def calls_of_products(plan: ops.RaggedPlan) -> Iterator[tuple[str, Arguments]]:
    rows, matrices, sizes = torch.randn(10, 4), torch.randn(3, 4, 6), plan.group_sizes
    factors = {"rhs_a": torch.randn(3, 4, 2), "rhs_b": torch.randn(3, 2, 6)}
    product = {"lhs": rows, "rhs": matrices, "group_sizes": sizes, "rhs_bias": torch.randn(3, 6), "group_offset": 0}
    yield "gmm", product
    yield "gmm", product | factors
    stack = quantize(matrices, "mxfp4")
    parts = {"rhs": stack.codes, "rhs_scales": stack.scales, "rhs_zeros": None, "rhs_format": "mxfp4"}
    quantized = product | parts | {"rhs_columns": 4, "rhs_is_transposed": True}
    yield "gmm", quantized
    yield "gmm", quantized | factors
    integers, zeros = quantize(matrices, "int4"), torch.full((3, 6, 1), 5, dtype=torch.uint8)
    parts = {"codes": integers.codes, "scales": integers.scales, "zeros": zeros}
    yield "dequantize", parts | {"format": "int4", "columns": 4, "dtype": torch.float32}
    x = torch.randn(5, 4)
    yield "linear", {"x": x, "weight": torch.randn(3, 4), "bias": torch.randn(3), "out_dtype": None}
    yield "tgmm", {"lhs": rows, "rhs": rows, "group_sizes": sizes, "num_local_groups": 3, "group_offset": 0}
    yield "ragged_dot", {"a": x, "b": rows, "index": plan.rows, "group_size": 2}


def routing_rules() -> Arguments:
    rules: Arguments = {"top_k": 2, "score_function": "softmax", "normalization": "sum", "scale": 1.0}
    return rules | {"correction_bias": torch.randn(3), "num_groups": 1, "top_k_groups": 1, "group_score": "top2"}


def calls_of_routing(experts: Tensor) -> Iterator[tuple[str, Arguments]]:
    logits = torch.randn(5, 3)
    rules = routing_rules()
    yield "route", {"logits": logits, **rules, "experts": experts}
    gradients = {"grad_weights": torch.rand(5, 2), "grad_probabilities": torch.randn(5, 3)}
    scores = {name: rules[name] for name in ("score_function", "normalization", "scale")}
    yield "route_backward", {**gradients, "logits": logits, "experts": experts, **scores}
    yield "router_entropy", {"probabilities": logits.softmax(1), "divisor": 5}
    bounds = {"first_expert": 0, "num_local_experts": 3, "max_rows": None, "num_rows": None}
    yield "ragged_plan", {"experts": experts, "num_experts": 3, **bounds}


def calls_of_movement(plan: ops.RaggedPlan) -> Iterator[tuple[str, Arguments]]:
    x, weights, rows, list_weights = torch.randn(5, 4), torch.rand(5, 2), torch.randn(10, 4), torch.rand(10)
    yield "ragged_gather", {"x": x, "index": plan.slots // 2, "weights": list_weights, "start": 1, "end": 9}
    valid = list_weights > 0.3
    reduce = {"rows": rows, "index": plan.rows, "group_size": 2, "weights": list_weights, "valid": valid}
    yield "ragged_gather_reduce", reduce
    scatter = {"rows": x, "index": plan.rows, "num_rows": 10, "group_size": 2, "weights": list_weights}
    yield "ragged_scatter_add", scatter
    yield "ragged_sort", {"x": x, "slots": plan.slots, "rows": plan.rows, "top_k": 2, "weights": weights}
    unsort = {"rows": rows, "slots": plan.slots, "row_of_slot": plan.rows, "top_k": 2, "weights": weights}
    yield "ragged_unsort", unsort


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


def without_gradients(function: Any) -> Callable[..., Any]:
    return torch.no_grad()(function)


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


def inference(function: Any) -> Callable[..., Any]:
    return torch.inference_mode()(function)


def autocast(function: Any) -> Callable[..., Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)(torch.no_grad()(function))


WAYS = (without_gradients, with_gradients, inference, autocast)


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
        for way in WAYS:
            if way is with_gradients and operator.endswith(("_forward", "_backward")):
                continue
            for change in changes_of(arguments):
                announce(operator, way.__name__, change)
                check(operator, arguments, change, way)
        if not operator.endswith(("_forward", "_backward", "_plan", "dequantize")):
            check_saved_tensors(operator, arguments)


def test_hostile_calls() -> None:
    """In a fork, which may crash: the last line that it has printed names the call."""
    call_in_fork(main, seconds=300)
