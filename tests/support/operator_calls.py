"""Calls of our operators and of the reference with the same arguments, and comparisons of their results."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from maxmoe.quantization import QuantizedStack
from support.messages import containing

PROJECTIONS = {"expert_ffn": ("gate", "up", "down"), "gmm": ("rhs",)}


@dataclass(frozen=True)
class Call:
    """An operator with its arguments by name, for our operators and for the reference alike.

    The fields of a projection such as `up` are arguments here, so that tests reach each tensor: up, up_bias,
    up_factors.a, up_factors.b and up_factors.scale. Quantized stacks are not among the tensors: they are frozen, and
    have no other strides or dtypes. The reference gets their values.
    """

    operator: str
    arguments: dict[str, Any]

    def __call__(self, module: Any = ops) -> tuple[Tensor, ...]:
        out = getattr(module, self.operator)(**self.with_projections(module))
        return out if isinstance(out, tuple) else (out,)

    def with_projections(self, module: Any = ops) -> dict[str, Any]:
        """The arguments as the operator takes them."""
        arguments = dict(self.arguments)
        types = reference if module is reference else ops
        for name in PROJECTIONS.get(self.operator, ()):
            weights, bias = arguments[name], arguments.pop(f"{name}_bias", None)
            prefix = f"{name}_factors."
            fields = {key.removeprefix(prefix): arguments.pop(key) for key in list(arguments) if key.startswith(prefix)}
            if types is reference and isinstance(weights, QuantizedStack):
                weights = weights.dequantize(torch.float64)
            if bias is not None or fields:
                arguments[name] = types.Projection(weights, bias, types.LowRankFactors(**fields) if fields else None)
            else:
                arguments[name] = weights
        return arguments

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, QuantizedStack)}

    def floats(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    def replace(self, **arguments: Any) -> "Call":
        """Return the call with other arguments. A name such as "plan.rows" stands for a field of the plan."""
        of_plan = {name: value for name, value in arguments.items() if name.startswith("plan.")}
        given = {**self.arguments, **{name: value for name, value in arguments.items() if name not in of_plan}}
        if of_plan:
            fields = {name.removeprefix("plan."): value for name, value in of_plan.items()}
            given["plan"] = given["plan"]._replace(**fields)
        return Call(self.operator, given)

    def cast(self, dtype: torch.dtype) -> "Call":
        return self.replace(**{name: value.to(dtype) for name, value in self.floats().items()})

    def trainable(self, frozen: Collection[str] = ()) -> "Call":
        """Return the call with new leaves that share the memory, so that strides stay."""
        trained = {name: value for name, value in self.floats().items() if name not in frozen}
        return self.replace(**{name: value.detach().requires_grad_() for name, value in trained.items()})


@dataclass(frozen=True)
class Result:
    """Outputs of a call, and the gradients of its floating-point arguments."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]

    def by_name(self) -> dict[str, Tensor | None]:
        """Return outputs and gradients."""
        gradients = {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}
        return {f"output {number}": output for number, output in enumerate(self.outputs)} | gradients


def floating(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output for output in outputs if output.is_floating_point()]


def cotangents_of(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Upstream gradients, the same for every call with outputs of these shapes and dtypes."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in floating(outputs)]


def result(
    call: Call, module: Any = ops, cotangents: list[Tensor] | None = None, frozen: Collection[str] = ()
) -> Result:
    """Runs forward and backward."""
    call = call.trainable(frozen)
    outputs = call(module)
    cotangents = cotangents_of(outputs) if cotangents is None else cotangents
    names = [name for name in call.floats() if name not in frozen]
    leaves = [call.arguments[name] for name in names]
    roots = [(out, c) for out, c in zip(floating(outputs), cotangents, strict=True) if out.requires_grad]
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if roots:
        out_of, along = zip(*roots, strict=True)
        gradients = torch.autograd.grad(out_of, leaves, along, allow_unused=True)
    detached = tuple(output.detach() for output in outputs)
    return Result(detached, dict(zip(names, gradients, strict=True)))


def assert_near(got: Tensor | None, expected: Tensor | None, relative: float, what: str) -> None:
    """Compare with a tolerance relative to the largest expected value, as sums of products lose precision."""
    if got is None or expected is None:
        assert not torch.any(got if got is not None else torch.zeros(())), what
        assert not torch.any(expected if expected is not None else torch.zeros(())), what
        return
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} is not {tuple(expected.shape)}"
    assert got.isfinite().all() or not expected.isfinite().all(), f"{what} is not finite"
    error = (got.double() - expected.double()).abs()
    bound = relative * expected.double().abs().max() if expected.numel() else torch.zeros(())
    assert (error <= bound).all(), f"{what}: error {error.max():.3e}, allowed {bound:.3e}"


def assert_same(got: Result, expected: Result, relative: float = 0.0) -> None:
    """Compare outputs and gradients of two calls; integers must be equal."""
    assert len(got.outputs) == len(expected.outputs)
    others = expected.by_name()
    for name, value in got.by_name().items():
        if value is None or value.is_floating_point():
            assert_near(value, others[name], relative, name)
        else:
            assert torch.equal(value, others[name]), name  # type: ignore[arg-type]


def tolerance(dtype: torch.dtype, roundings: int) -> float:
    """Relative error of `roundings` to a 16 bit dtype; in wider dtypes sums of n terms lose about n * eps / 4."""
    return torch.finfo(dtype).eps * (roundings if dtype.itemsize == 2 else 32)


def expected_result(call: Call) -> Result:
    """The reference in float64 on the values, rounded as they are, and the upstream gradient of the call."""
    with torch.no_grad():
        cotangents = [cotangent.double() for cotangent in cotangents_of(call())]
    return result(call.cast(torch.float64), reference, cotangents)


def strided(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides and garbage in the gaps; "expanded": the first value everywhere."""
    garbage = float("nan") if tensor.is_floating_point() else 10**9
    match layout:
        case "transposed" if tensor.dim() > 1:
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        case "columns":
            wider = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), garbage)
            wider[..., 1::2] = tensor
            return wider[..., 1::2]
        case "rows":
            wider = tensor.new_full((2 * tensor.shape[0] + 1, *tensor.shape[1:]), garbage)
            wider[1::2] = tensor
            return wider[1::2]
        case "expanded" if tensor.is_floating_point():
            return tensor[:1].expand_as(tensor)
    return tensor


@contextmanager
def refusal(operator: str, *named: Any) -> Iterator[None]:
    """Expect an error "maxmoe::<operator>: <argument> must ..., got ..." that contains all of `named`."""
    words = containing(*map(str, named))
    with pytest.raises((ValueError, RuntimeError), match=rf"(?s)maxmoe::{operator}: {words}"):
        yield
