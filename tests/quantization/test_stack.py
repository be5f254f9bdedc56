"""The tensor: views, copies, modules, files, and errors instead of everything else."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support.named import named

each_format = pytest.mark.parametrize("format", FORMATS)


def stack_of(format: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> QuantizedStack:
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(shape or (3, 256, 384), generator=generator).to(dtype), format)


def assert_same(got: Any, expected: QuantizedStack) -> None:
    """The same bits in the same layout."""
    assert type(got) is QuantizedStack and got.shape == expected.shape and got.stride() == expected.stride()
    assert (got.format, got.is_transposed, got.dtype) == (expected.format, expected.is_transposed, expected.dtype)
    for name, part in expected.parts().items():
        assert got.parts()[name].dtype == part.dtype and torch.equal(got.parts()[name], part), name


VIEWS: list[Callable[[Any], Tensor]] = [
    lambda stack: stack[1],
    lambda stack: stack[-1].mT,
    lambda stack: stack[0:2],
    lambda stack: stack[::2],
    lambda stack: stack[2:1],
    lambda stack: stack.narrow(0, 1, 2),
    lambda stack: stack.chunk(2)[1],
    lambda stack: stack.split(2)[0],
    lambda stack: stack.split([1, 2], dim=0)[1],
    lambda stack: stack.unbind()[2],
    lambda stack: [*stack][1],
    lambda stack: stack[torch.tensor([2, 0, 2])],
    lambda stack: stack[torch.tensor([True, False, True])],
    lambda stack: stack.index_select(0, torch.tensor([1])),
    lambda stack: stack.mT,
    lambda stack: stack.transpose(-1, 1),
    lambda stack: stack.transpose(0, 0),
    lambda stack: stack[:, 128:],
    lambda stack: stack[:, :, 128:256],
    lambda stack: stack.mT[:, 128:, :128],
    lambda stack: stack.chunk(2, dim=1)[1],
    lambda stack: stack.split(128, dim=2)[2],
    lambda stack: stack[1, 128:, :128].t(),
    lambda stack: stack.view(3, 256, 384),
    lambda stack: stack.detach(),
    lambda stack: stack.data,
]


@each_format
def test_views_and_indices(format: str) -> None:
    stack = stack_of(format)
    for number, view in enumerate(VIEWS):
        with named(f"view {number}"):
            got = view(stack)
            assert isinstance(got, QuantizedStack)
            assert torch.equal(got.dequantize(), view(stack.dequantize()))
            assert got.columns_per_scale == stack.columns_per_scale or got.columns < stack.columns_per_scale
            is_copy = got.codes.untyped_storage().data_ptr() != stack.codes.untyped_storage().data_ptr()
            assert is_copy == (got.numel() > 0 and "tensor" in str(view.__code__.co_names))


@each_format
def test_rows_alternate(format: str) -> None:
    """Gate and up of gpt-oss, where a block is of one row."""
    stack = stack_of(format)
    if format == "fp8_block":
        with pytest.raises(NotImplementedError, match="slice of rows with step 2, where a scale is of 128 rows"):
            stack[..., 0::2]
        return
    assert torch.equal(stack[..., 1::2].dequantize(), stack.dequantize()[..., 1::2])


@pytest.mark.parametrize(
    ("format", "cut", "message"),
    [
        (
            "mxfp4",
            lambda stack: stack[:, 16:],
            "columns of weights quantized as mxfp4 .* multiples of 32, .* got 16 of 256",
        ),
        (
            "nf4",
            lambda stack: stack[:, :96],
            "columns of weights quantized as nf4 .* multiples of 64, .* got 96 of 256",
        ),
        ("int4", lambda stack: stack.mT[..., 64:], "columns of weights quantized as int4 .* of 128, .* got 64 of 256"),
        (
            "fp8_block",
            lambda stack: stack[..., 100:],
            "rows of weights quantized as fp8_block .* of 128, .* got 100 of 384",
        ),
    ],
)
def test_slices_inside_of_a_block(format: str, cut: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(stack_of(format))


@pytest.mark.parametrize("format", ["fp8_row", "int8"])
def test_a_scale_of_the_whole_row_is_of_each_part_too(format: str) -> None:
    stack = stack_of(format)
    assert torch.equal(stack[:, 3:17, 5:9].dequantize(), stack.dequantize()[:, 3:17, 5:9])


@each_format
def test_the_last_block_may_be_shorter(format: str) -> None:
    stack = stack_of(format, 2, 170, 150)
    assert torch.equal(stack[:, 128:, 128:].dequantize(), stack.dequantize()[:, 128:, 128:])


@each_format
def test_copies(format: str) -> None:
    stack = stack_of(format)
    copies = (stack.clone(), copy.deepcopy(stack), stack.to("cpu", copy=True), stack.contiguous())
    for copied in (*copies, pickle.loads(pickle.dumps(stack))):
        assert_same(copied, stack)
        assert copied.codes.data_ptr() != stack.codes.data_ptr()
    empty = torch.empty_like(stack)
    empty.copy_(stack)
    assert_same(empty, stack)
    empty.codes.zero_()
    empty[1] = stack[1]
    assert torch.equal(empty.codes[1], stack.codes[1]) and not empty.codes[0].any()
    assert stack.cpu() is stack
    larger = stack.new_empty(4, 256, 128)
    assert larger.shape == (4, 256, 128) and larger.columns_per_scale == stack.columns_per_scale
    larger[:3].copy_(stack[..., :128])
    assert torch.equal(larger[:3].dequantize(), stack.dequantize()[..., :128])
    meta = stack.to("meta")
    assert meta.is_meta and meta.codes.is_meta and meta.nbytes == stack.nbytes and meta.shape == stack.shape
    assert_same(torch.empty_like(meta, device="cpu").copy_(stack), stack)


@each_format
def test_dtype_is_nominal(format: str) -> None:
    """A model in another dtype has the same bytes, without a copy."""
    module = nn.Module()
    module.weight = nn.Parameter(stack_of(format), requires_grad=False)
    codes, scales = module.weight.codes, module.weight.scales
    for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16):
        module.to(dtype)
        weight = module.weight
        assert isinstance(weight, nn.Parameter) and isinstance(weight, QuantizedStack)
        assert weight.dtype == dtype == weight.dequantize().dtype and weight.is_floating_point()
        assert weight.codes.data_ptr() == codes.data_ptr() and weight.scales.data_ptr() == scales.data_ptr()
        assert weight.scales.dtype == scales.dtype
    assert module.half().weight.dtype == torch.float16
    for convert in (module.weight.to, module.weight.dequantize):
        with pytest.raises(ValueError, match=r"dtype must be float64, float32, bfloat16 or float16, got torch.int8"):
            convert(torch.int8)


def module_with(stack: QuantizedStack) -> nn.Module:
    module = nn.Linear(2, 2)
    module.stack = nn.Parameter(stack, requires_grad=False)
    return module


@each_format
def test_modules_and_files(format: str, tmp_path: Path) -> None:
    stack = stack_of(format)
    module = module_with(stack)
    assert [*module.state_dict()] == ["weight", "bias", "stack"]
    assert sum(parameter.requires_grad for parameter in module.parameters()) == 2
    torch.save(module.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert_same(state["stack"], stack)
    for assign in (False, True):
        other = module_with(torch.empty_like(stack))
        other.load_state_dict(state, assign=assign)
        assert isinstance(other.stack, nn.Parameter)
        assert_same(other.stack, stack)
    other = module_with(stack.to("meta")).to_empty(device="cpu")
    other.load_state_dict(state)
    assert_same(other.stack, stack)
    torch.save(module, tmp_path / "module")
    again = torch.load(tmp_path / "module", weights_only=False)
    assert isinstance(again.stack, nn.Parameter)
    assert_same(copy.deepcopy(again).stack, stack)
    assert isinstance(copy.deepcopy(again).stack, nn.Parameter)


def test_a_file_with_scales_that_are_not_finite(tmp_path: Path) -> None:
    stack = stack_of("nf4")
    stack.scales[1, 2, 0] = torch.nan
    torch.save(stack, tmp_path / "stack")
    with pytest.raises(ValueError, match=r"scales must be finite, got nan at \(1, 2, 0\)"):
        torch.load(tmp_path / "stack")
    with pytest.raises(ValueError, match=r"scales must be finite, got nan at \(1, 2, 0\)"):
        torch.empty_like(stack).copy_(stack)


def test_what_cannot_be_copied() -> None:
    stack = stack_of("int4")
    for other, message in (
        (stack_of("nf4"), "format of a quantized stack that is copied must be int4, got nf4"),
        (stack[1:], r"shape .* must be \(3, 256, 384\), transposed, got \(2, 256, 384\), transposed"),
        (quantize(stack.dequantize(), "int4", 32), r"scales .* \(3, 384, 2\), got torch.bfloat16 \(3, 384, 8\)"),
        (stack_of("int4", 3, 384, 256).mT, r"shape .* must be \(3, 256, 384\), transposed, got \(3, 256, 384\)"),
        (stack_of("int4", dtype=torch.float32), r"scales .* must be torch.bfloat16 .*, got torch.float32"),
        (
            QuantizedStack(
                stack.codes,
                stack.scales,
                zeros=stack.scales.new_full(stack.scales.shape, 8, dtype=torch.uint8),
                format="int4",
                is_transposed=True,
            ),
            "format .* must be int4, got int4 with zero points",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            stack.copy_(other)
    with pytest.raises(RuntimeError, match="a copy from a tensor that is not quantized is not possible"):
        module_with(stack).load_state_dict(module_with(stack).state_dict() | {"stack": stack.dequantize()})
    with pytest.raises(NotImplementedError, match="a copy to a tensor that is not quantized is not possible"):
        stack.dequantize().copy_(stack)


@pytest.mark.parametrize(
    "operation",
    [
        lambda stack: stack + 1,
        lambda stack: stack.mul_(2),
        lambda stack: torch.ones(3, 2, 256) @ stack,
        lambda stack: nn.functional.linear(torch.ones(2, 384), stack[0]),
        lambda stack: stack.sum(),
        lambda stack: stack == stack,
        lambda stack: torch.equal(stack, stack),
        lambda stack: torch.cat([stack, stack]),
        lambda stack: torch.zeros_like(stack),
        lambda stack: stack.reshape(-1),
        lambda stack: stack.permute(2, 0, 1),
        lambda stack: stack.transpose(0, 1),
        lambda stack: stack[:, 3],
        lambda stack: stack[0, :, 0],
        lambda stack: stack[:, torch.tensor([1])],
        lambda stack: stack[:, ::2],
        lambda stack: stack.view(torch.uint8),
        lambda stack: nn.init.normal_(stack),
        lambda stack: stack.tolist(),
        lambda stack: stack.numpy(),
        lambda stack: stack.backward(),
        lambda stack: torch.ops.maxmoe.gmm(torch.ones(2, 256), stack, torch.tensor([2, 0, 0])),
    ],
)
def test_no_other_operation_computes_anything(operation: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError) as raised:
        operation(stack_of("mxfp4"))
    if raised.type is NotImplementedError:
        assert "weights quantized as mxfp4, of shape" in str(raised.value)
        assert "stack.dequantize() returns a tensor" in str(raised.value)


def test_frozen() -> None:
    stack = stack_of("mxfp4")
    for ask in (
        lambda: nn.Parameter(stack),
        lambda: stack.requires_grad_(),
        lambda: setattr(stack, "requires_grad", True),
        lambda: module_with(stack).requires_grad_(),
    ):
        with pytest.raises(RuntimeError, match="weights quantized as mxfp4 are frozen and have no gradient"):
            ask()
    assert not stack.requires_grad and not stack.requires_grad_(False).requires_grad
    assert not module_with(stack).requires_grad_(False).stack.requires_grad


def test_memory_is_that_of_several_tensors() -> None:
    module, stack = module_with(stack_of("int4")), stack_of("mxfp4")
    assert not module.stack.is_shared() and module.share_memory().stack.is_shared()
    assert torch.equal(module.stack.dequantize(), stack_of("int4").dequantize())
    with pytest.raises(RuntimeError, match=r"without one storage.*use torch.save.*write_checkpoint"):
        pytest.importorskip("safetensors.torch").save({"stack": stack})
    with pytest.raises(AttributeError, match=r"data of weights quantized as mxfp4 cannot be replaced: use stack.copy_"):
        stack.data = stack.clone()


def test_repr() -> None:
    assert repr(nn.Parameter(stack_of("mxfp4"), requires_grad=False)) == (
        "QuantizedStack(Parameter, shape=(3, 256, 384), format='mxfp4', block=1 x 32, nbytes=156672, "
        "dtype=torch.bfloat16, device='cpu')"
    )
