"""Parameters of quantized weights in conversions, files, copies and other modules."""

import copy
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from maxmoe.ops import Projection, gmm
from maxmoe.quantization import (
    FORMATS,
    QuantizedStack,
    QuantizedWeight,
    put_stack,
    stack_parts,
    state_with_stacks,
    weights,
)
from support.quantized_calls import stack_of
from support.run_ranks import run_cases

each_format = pytest.mark.parametrize("format", FORMATS)


def module_with(stack: QuantizedStack) -> nn.Module:
    module = nn.Linear(2, 2)
    module.up_proj = QuantizedWeight(stack)
    return module


def assert_same(got: QuantizedStack, expected: QuantizedStack) -> None:
    for name in ("format", "shape", "is_transposed"):
        assert getattr(got, name) == getattr(expected, name)
    assert all(torch.equal(got.parts()[name], part) for name, part in expected.parts().items())


@each_format
def test_parameters(format: str) -> None:
    stack = stack_of(format)
    module = module_with(stack)
    names = [f"up_proj.{format}_codes", "up_proj.scales", *["up_proj.row_scales"] * FORMATS[format].has_row_scales]
    assert [*module.state_dict()] == [name for name, _ in module.named_parameters()] == ["weight", "bias", *names]
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["weight", "bias"]
    assert module.up_proj.codes.data_ptr() == stack.codes.data_ptr(), "the memory is shared"
    assert isinstance(module.up_proj, QuantizedStack) and f"format='{format}'" in repr(module)
    assert_same(module.up_proj, stack)
    assert [*stack_parts(module)["up_proj"]] == names
    of_codes = stack_parts(module)["up_proj"][names[0]]  # (L, out, in)
    assert of_codes.names(("exp", "embed", "mlp")) == ("exp", "mlp", "embed")
    assert [*state_with_stacks(module)] == ["weight", "bias", "up_proj"]
    sizes = {4, 2, 3 * 256 * 384}
    assert {weight.numel() for weight in weights(module)} == sizes
    assert {weight.numel() for weight in weights(nn.Sequential(module, module))} == sizes
    assert {weight.numel() for weight in weights(module, recurse=False)} == {4, 2}
    x, counts = torch.randn(3, 256, dtype=torch.bfloat16), torch.tensor([1, 2, 0])
    assert torch.equal(gmm(x, module.up_proj, counts), gmm(x, stack.dequantize(), counts))
    with pytest.raises(RuntimeError, match="floating point"):
        module.requires_grad_()


@each_format
def test_dtype_is_nominal(format: str) -> None:
    """A model in another dtype has the same bytes, without a copy."""
    module = module_with(stack_of(format))
    codes, scales, row_scales = module.up_proj.codes, module.up_proj.scales, module.up_proj.row_scales
    for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16):
        weight = module.to(dtype).up_proj
        assert weight.dtype == dtype == weight.dequantize().dtype == module.weight.dtype
        assert weight.codes is codes and weight.scales is scales and weight.row_scales is row_scales
    assert module.half().up_proj.dtype == torch.float16
    assert scales.dtype == stack_of(format).scales.dtype


@each_format
def test_files_and_copies(format: str, tmp_path: Path) -> None:
    stack = stack_of(format)
    module = module_with(stack)
    torch.save(module.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    for assign in (False, True):
        other = module_with(stack.map(torch.zeros_like))
        other.load_state_dict(state, assign=assign)
        assert_same(other.up_proj, stack)
    other = module_with(stack.map(lambda part: part.to("meta"))).to_empty(device="cpu")
    other.load_state_dict(state)
    assert_same(other.up_proj, stack)
    torch.save(module, tmp_path / "module")
    again = torch.load(tmp_path / "module", weights_only=False)
    for copied in (again, copy.deepcopy(again)):
        assert_same(copied.up_proj, stack)
        assert copied.to(torch.float32).up_proj.scales.dtype == stack.scales.dtype
        assert copied.up_proj.codes.data_ptr() != stack.codes.data_ptr()
    assert not module.up_proj.codes.is_shared() and module.share_memory().up_proj.codes.is_shared()


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    module, other = module_with(stack_of("int4")), module_with(stack_of("int4").map(torch.zeros_like))
    save_model(module, str(tmp_path / "file"))
    load_model(other, str(tmp_path / "file"))
    assert_same(other.up_proj, module.up_proj)


def test_files_that_do_not_fit() -> None:
    """Another format with the same shapes and dtypes, scales of another dtype, and scales that are not finite."""
    module = module_with(stack_of("int8"))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*int8_codes.*Unexpected key.*fp8_row_codes"):
        module.load_state_dict(module_with(stack_of("fp8_row")).state_dict())
    state = module_with(stack_of("int4", dtype=torch.float32)).state_dict()
    other = module_with(stack_of("int4"))
    with pytest.raises(ValueError, match=r"up_proj.scales must be torch.bfloat16, as in the module, got torch.float32"):
        other.load_state_dict(state)
    other.load_state_dict(state, assign=True)
    assert other.up_proj.scales.dtype == torch.float32
    state = module.state_dict()
    state["up_proj.scales"] = state["up_proj.scales"].index_fill(0, torch.tensor([1]), torch.nan)
    for assign in (False, True):
        with pytest.raises(ValueError, match=r"up_proj: scales must be finite, got nan at \(1, 0, 0\)"):
            module.load_state_dict(state, assign=assign)
    state = module_with(stack_of("nvfp4")).state_dict()
    state["up_proj.row_scales"] = state["up_proj.row_scales"].index_fill(0, torch.tensor([1]), torch.inf)
    with pytest.raises(ValueError, match=r"up_proj: row_scales must be between -7.6e\+35 and 7.6e\+35, got inf at \(1"):
        module_with(stack_of("nvfp4")).load_state_dict(state)


def test_one_matrix() -> None:
    with pytest.raises(ValueError, match=r"stack must be of matrices, of shape \(L, in, out\), got \(256, 384\)"):
        QuantizedWeight(stack_of("int8")[0])


def test_one_weight_in_the_place_of_another() -> None:
    module = nn.Module()
    module.up_proj = nn.Parameter(torch.ones(2, 64, 32))
    put_stack(module, "up_proj", stack_of("int4", 2, 64, 32))
    assert not [*module.named_parameters(recurse=False)] and module.up_proj.shape == (2, 64, 32)
    module.up_proj = nn.Parameter(module.up_proj.dequantize())
    assert [name for name, _ in module.named_parameters()] == ["up_proj"]


def test_ddp_and_fsdp2() -> None:
    """DDP and FSDP2 send codes and scales as bytes."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    class Experts(nn.Module):
        def __init__(self, format: str) -> None:
            super().__init__()
            self.up_proj = QuantizedWeight(stack_of(format, 2, 64, 256, dtype=torch.float32))
            self.bias = nn.Parameter(torch.zeros(2, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gmm(x, Projection(self.up_proj, self.bias), torch.tensor([1, 2]))

    def check(format: str) -> None:
        expected, module = Experts(format)(x), Experts(format)
        module.up_proj.codes.mul_(1 - dist.get_rank())
        module = DistributedDataParallel(module).module  # gives all ranks the weights of the first
        assert torch.equal(module(x), expected)
        fully_shard(module)
        assert module.up_proj.codes.to_local().shape[0] == 1
        assert torch.equal(module(x), expected)
        module(x).sum().backward()
        assert module.bias.grad.full_tensor().any()

    run_cases(check, 2, [(format,) for format in FORMATS])
