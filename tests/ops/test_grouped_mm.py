"""The products of groups of rows on devices: which go to at::_grouped_mm, and that it supports their arguments."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maxmoe import ops, reference
from maxmoe.quantization import quantize
from support.device_memory import DeviceMemory, SynchronizationError, to_device, to_host
from support.operator_calls import strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "transposed", "columns", "shifted"]
SIZES = torch.tensor([3, 0, 5, 4, 0])


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides, or at an address that is not aligned."""
    if layout == "shifted":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return strided(tensor, layout)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (to_host(got).double() - expected).abs().max()
    assert to_host(got).is_contiguous() and error <= 16 * torch.finfo(dtype).eps * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize(
    ("width", "dtype"), [*zip([1, 7, 8, 12, 16], [*DTYPES, *DTYPES], strict=False), (8, torch.float32)], ids=str
)
def test_every_layout_is_one_grouped_product(width: int, dtype: torch.dtype) -> None:
    """Operands with sizes or addresses that are not multiples of 16 bytes are copied; no operand is refused."""
    num_rows = int(SIZES.sum()) + 2
    for layout, other in itertools.product(LAYOUTS, LAYOUTS):
        lhs, rhs, rows = (torch.randn(s).to(dtype) for s in [(num_rows, width), (5, width, 9), (num_rows, 9)])
        for matrix in (rhs, rhs.mT.contiguous().mT):
            with DeviceMemory() as device:
                arguments = [to_device(laid_out(lhs, layout)), to_device(laid_out(matrix, other)), to_device(SIZES)]
                product = ops.gmm(*arguments)
                groups = ops.tgmm(arguments[0], to_device(laid_out(rows, other)), arguments[2], 5)
            assert device.calls["_grouped_mm"] == 2 and not device.calls["mm"]
            assert_near(product, reference.gmm(lhs.double(), matrix.double(), SIZES), dtype)
            assert_near(groups, reference.tgmm(lhs.double(), rows.double(), SIZES, 5), dtype)


@pytest.mark.parametrize("group_offset", [-7, -1, 0, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [0, 6, 0, 2], [8, 0, 0, 0], [1, 2, 3, 4]], ids=str)
def test_any_groups(sizes: list[int], group_offset: int) -> None:
    """Empty groups, rows after the last group, and local groups that begin before, inside of or past all groups."""
    lhs, rhs, rows, bias = torch.randn(11, 6), torch.randn(3, 6, 5), torch.randn(11, 5), torch.randn(3, 5)
    group_sizes = torch.tensor(sizes)
    with DeviceMemory() as device:
        on_device = [to_device(each) for each in (lhs, rhs, group_sizes, rows, bias)]
        projection = ops.Projection(on_device[1], on_device[4])
        product = ops.gmm(on_device[0], projection, on_device[2], group_offset=group_offset)
        groups = ops.tgmm(on_device[0], on_device[3], on_device[2], 3, group_offset=group_offset)
    assert device.calls["_grouped_mm"] == 2
    of_loops = reference.Projection(rhs.double(), bias.double())
    expected = reference.gmm(lhs.double(), of_loops, group_sizes, group_offset=group_offset)
    assert_near(product, expected, torch.float32)
    expected = reference.tgmm(lhs.double(), rows.double(), group_sizes, 3, group_offset=group_offset)
    assert_near(groups, expected, torch.float32)


EMPTY = ("rows", "hidden_size", "intermediate_size", "groups")


@pytest.mark.parametrize("empty", EMPTY)
def test_empty_operands_are_no_product(empty: str) -> None:
    rows, hidden_size, intermediate_size, groups = (0 if empty == name else 4 for name in EMPTY)
    lhs, rhs = torch.randn(rows, hidden_size), torch.randn(groups, hidden_size, intermediate_size)
    with DeviceMemory() as device:
        sizes = to_device(torch.full((groups,), rows // 4))
        product = ops.gmm(to_device(lhs), to_device(rhs), sizes)
        gradient = ops.tgmm(to_device(lhs), product, sizes, groups)
    assert not device.calls["_grouped_mm"]
    assert product.shape == (rows, intermediate_size) and not to_host(product).any()
    assert gradient.shape == rhs.shape and not to_host(gradient).any()


@pytest.mark.parametrize(
    ("dtype", "num_groups", "is_grouped"),
    [(torch.float32, 1022, True), (torch.float32, 1023, False), (torch.float64, 3, False)],
    ids=str,
)
def test_what_is_not_legal_waits_and_is_right(dtype: torch.dtype, num_groups: int, is_grouped: bool) -> None:
    """float64, and more groups than the CUDA kernel takes, are multiplied group by group."""
    lhs, rhs = torch.randn(20, 8, dtype=dtype), torch.randn(num_groups, 8, 8, dtype=dtype)
    sizes = torch.zeros(num_groups, dtype=torch.int64)
    sizes[[0, -1]] = 10
    with DeviceMemory() as device:
        arguments = [to_device(lhs), to_device(rhs), to_device(sizes)]
        if is_grouped:
            ops.gmm(*arguments)
        else:
            with pytest.raises(SynchronizationError):
                ops.gmm(*arguments)
    assert device.calls["_grouped_mm"] == is_grouped
    with ops.force_aten():
        assert_near(ops.gmm(lhs, rhs, sizes), reference.gmm(lhs.double(), rhs.double(), sizes), dtype)


class LeftHandSides(TorchDispatchMode):
    """Sees the left-hand side of every product that operators of maxmoe compute through PyTorch's on the CPU."""

    DEPTH = 32

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "maxmoe":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        if function in (torch.ops.aten._grouped_mm.default, torch.ops.aten.mm.default):
            self.calls += 1
            self.check(args[0])
        return function(*args, **(kwargs or {}))

    def check(self, left: Tensor) -> None:
        """Rows are followed by zeros up to a multiple of DEPTH elements; transposed ones are not read further."""
        if left.stride(1) != 1 or left.shape[1] % self.DEPTH == 0:
            return
        memory = torch.empty(0, dtype=left.dtype).set_(left.untyped_storage())
        for row in range(left.shape[0]):
            first = left.storage_offset() + row * left.stride(0)
            behind = memory[first + left.shape[1] : first + -(-left.shape[1] // self.DEPTH) * self.DEPTH]
            assert torch.equal(behind, torch.zeros_like(behind)), f"{behind} behind row {row} of {left.shape}"


@pytest.mark.parametrize("width", [1, 33, 40, 64, 100])
@pytest.mark.parametrize("weights", ["given", "quantized", "factors"])
def test_nothing_but_zeros_stands_behind_rows(width: int, weights: str) -> None:
    """With AMX, torch's products of bfloat16 read rows past their end, and zero times NaN is NaN.

    NaN stands behind the rows of every argument, and in row 3 of 12: only its result is NaN.
    """

    def within_nan(tensor: Tensor) -> Tensor:
        wider = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 40), torch.nan)
        wider[..., : tensor.shape[-1]] = tensor
        return wider[..., : tensor.shape[-1]]

    lhs, rhs, grad = (torch.randn(s).bfloat16() for s in [(12, width), (5, width, 48), (12, 48)])
    lhs[3] = torch.nan
    projection = ops.Projection(quantize(rhs, "int8") if weights == "quantized" else within_nan(rhs))
    if weights == "factors":
        a, b = (within_nan(torch.randn(s).bfloat16()) for s in [(5, width, 3), (5, 3, 48)])
        projection = ops.Projection(within_nan(rhs), factors=ops.LowRankFactors(a, b))
    with ops.force_aten(), LeftHandSides() as seen:
        product = ops.gmm(within_nan(lhs), projection, SIZES)
        groups = ops.tgmm(within_nan(lhs), within_nan(grad), SIZES, 5)
    assert seen.calls > 1
    assert product.isnan().any(1).nonzero().flatten().tolist() == [3]
    assert groups.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [2]
