"""Quantized experts on a mesh: modules, saving and errors; test_parallelize.py compares their training."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from maxmoe import quantize_experts
from maxmoe.costs import estimate
from maxmoe.parallel import parallelize, reset_parameters
from maxmoe.quantization import QuantizedStack, QuantizedWeight, dequantize_experts
from maxmoe.sharding import Mesh
from support import adapted_decoders
from support.parallel_decoder import BLOCK, CONFIG, MOE, decoder
from support.run_ranks import fake_rank

WIDE = replace(BLOCK, hidden_size=64, moe=replace(MOE, hidden_size=64, intermediate_size=64))


def quantized(format: str) -> nn.Module:
    return adapted_decoders.quantized(format, WIDE)


def test_the_module_after_parallelize() -> None:
    model = quantized("int8").requires_grad_(False)
    whole = {name: weight for name, weight in model.named_modules() if isinstance(weight, QuantizedWeight)}
    shapes = {name: weight.shape for name, weight in whole.items()}
    optimizer = torch.optim.AdamW(whole.popitem()[1].parameters(), lr=0.1)
    with fake_rank(1, 2):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")
        experts = model.blocks[0].feed_forward.experts
        for name, shape in shapes.items():
            attribute = getattr(experts, name.rpartition(".")[2])
            assert isinstance(attribute, QuantizedStack) and attribute.shape == shape
            for part, dtype in (("int8_codes", torch.uint8), ("scales", torch.float32)):
                parameter = model.get_parameter(f"{name}.{part}")
                assert isinstance(parameter, DTensor) and parameter.dtype == dtype
                assert not parameter.requires_grad
        assert "QuantizedWeight((8, 64, 64), format='int8', block=1 x 64, scales=torch.float32, " in repr(experts)
        scales = experts.up_proj.scales.to_local().clone()
        model.to(torch.bfloat16)
        assert experts.up_proj.dtype == experts.up_bias.dtype == torch.bfloat16
        assert torch.equal(experts.up_proj.scales.to_local(), scales) and scales.dtype == torch.float32
        with pytest.raises(ValueError, match="experts quantized as int8 are not initialized"):
            reset_parameters(experts)
        with pytest.raises(
            RuntimeError, match=r"AdamW must be made after parallelize: it holds the replaced .*int8_codes"
        ):
            optimizer.step()
        with pytest.raises(ValueError, match=r"experts.gate_proj must not be quantized yet, got int8"):
            quantize_experts(model, "int8")
        with pytest.raises(ValueError, match=r"^dequantize_experts needs whole tensors, got .*_proj as a DTensor"):
            dequantize_experts(model)


@pytest.mark.parametrize(
    ("format", "width", "message"),
    [
        ("mxfp4", 96, r"down_proj is quantized as mxfp4, in blocks of 32 columns: .* of its 96 columns, got 48"),
        ("nvfp4", 80, r"down_proj is quantized as nvfp4, in blocks of 16 columns: .* of its 80 columns, got 40"),
        ("int4", 160, r"down_proj is quantized as int4, in blocks of 128 columns: .* of its 160 columns, got 80"),
        ("fp8_block", 192, r"gate_proj is quantized as fp8_block, in blocks of 128 rows: .* of its 192 rows, got 96"),
    ],
)
def test_blocks_are_not_cut(format: str, width: int, message: str) -> None:
    """Nor a shorter last block, even if the number of blocks is divisible by the ranks; the model is unchanged."""
    model = decoder(replace(CONFIG, moe=replace(MOE, intermediate_size=width))).requires_grad_(False)
    quantize_experts(model, format)
    before = dict(model.named_parameters())
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(model, Mesh({"tensor": 2}), "default")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    with pytest.raises(ValueError, match=message):
        estimate(model, Mesh.planned({"tensor": 2}), "default", batch_size=2, sequence_length=8)
