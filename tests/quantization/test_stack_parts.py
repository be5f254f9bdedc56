"""Stacks as parameters of their own: what a module has while they are split, and afterwards."""

import pytest
import torch
from torch import Tensor, nn

from maxmoe.quantization import (
    FORMATS,
    QuantizedStack,
    parts_of_stacks,
    quantize,
    split_stacks,
    weights,
    with_split_stacks,
)


def stack_of(format: str, *shape: int) -> QuantizedStack:
    return quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), format)


class Experts(nn.Module):
    def __init__(self, format: str) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(2, 3))
        self.up_proj = nn.Parameter(stack_of(format, 2, 256, 384), requires_grad=False)
        self.register_parameter("bias", None)
        self.after = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("format", FORMATS)
def test_split_and_put_together(format: str) -> None:
    model = nn.Sequential(Experts(format))
    before, kind = dict(model.named_parameters()), type(model[0])
    stack = model[0].up_proj
    sizes = [weight.numel() for weight in weights(model)]

    @with_split_stacks(kept=False)
    def look(module: nn.Module) -> list[str]:
        assert isinstance(module[0], Experts) and type(module[0]) is not kind
        assert split_stacks(module[0]).keys() == {"up_proj"}
        assert torch.equal(module[0].up_proj.dequantize(), stack.dequantize())
        assert module[0].up_proj.codes.data_ptr() == stack.codes.data_ptr(), "the memory is shared"
        assert sorted(weight.numel() for weight in weights(module)) == sorted(sizes)
        names = [name for name, _ in module.named_parameters()]
        (found,) = parts_of_stacks(module)
        assert found[0] == "0.up_proj" and list(found[1]) == names[1:-1]
        return names

    parts = [f"0.up_proj_{format}_{part}" for part in stack.parts()]
    assert look(model) == ["0.before", *parts, "0.after"]
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert type(model[0]) is kind and not split_stacks(model[0])
    assert model[0].bias is None


def test_an_error_leaves_the_module_as_it_was() -> None:
    model = Experts("mxfp4")

    @with_split_stacks(kept=True)
    def fail(module: nn.Module) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(model)
    assert type(model) is Experts and isinstance(model.get_parameter("up_proj"), QuantizedStack)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_a_rank(format: str, dim: int) -> None:
    """Parts that are cut evenly are those of a slice of the stack; parts of all columns keep an odd number of them."""
    stack = stack_of(format, 2, 256, 512).mT  # rows, columns

    def cut(part: Tensor) -> Tensor:
        return part.chunk(2, dim)[1] if part.shape[dim] > 1 else part

    found = stack.of_parts({name: cut(part) for name, part in stack.parts().items()})
    expected = stack.dequantize().chunk(2, dim)[1]
    assert found.shape == expected.shape and torch.equal(found.dequantize(), expected)
    odd = stack_of(format, 2, 33, 7)
    assert odd.of_parts(odd.parts()).shape == (2, 33, 7)


@pytest.mark.parametrize(("format", "names"), [("fp8_row", ("exp", "out", None)), ("mxfp4", ("exp", "out", "in"))])
def test_names_of_scales(format: str, names: tuple[str | None, ...]) -> None:
    """A scale of a whole row is needed with every shard of its columns."""
    model = Experts(format)

    @with_split_stacks(kept=False)
    def look(module: nn.Module) -> list[tuple[str | None, ...]]:
        ((_, parts),) = parts_of_stacks(module)
        return [part.names(("exp", "in", "out")) for part in parts.values()]

    assert look(model) == [("exp", "out", "in"), names]
