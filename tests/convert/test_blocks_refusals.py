"""Layers that MoE.to_transformers and write_checkpoint refuse, before a tensor is moved or written."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from maxmoe import MoE, presets, quantize_experts
from maxmoe.convert.blocks import config_of_block
from maxmoe.nn import Router, Routing
from support.small_models import block_of

pytest.importorskip("transformers")


class Reversed(Router):
    """A custom router with the weights of `Router`."""

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        return super().forward(-x, token_mask, experts)


def gated_by_cosine(gate: Tensor | None, up: Tensor) -> Tensor:
    return up.cos() if gate is None else gate.cos() * up


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda config: MoE(config, router=Reversed(config)),
            "needs the router of the config, maxmoe.nn.Router, got Reversed: other libraries would",
        ),
        (
            lambda config: MoE(config, activation=gated_by_cosine),
            "needs the activation of the config in experts, got <function gated_by_cosine",
        ),
    ],
    ids=["router", "activation"],
)
def test_parts_of_ones_own_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from maxmoe.convert.checkpoint import write_checkpoint

    block = block_of("mixtral")
    layer = make(presets.from_transformers(block.experts.config))
    with pytest.raises(ValueError, match=f"to_transformers {re.escape(message)}"):
        layer.to_transformers(block)
    with pytest.raises(ValueError, match=f"model.layers.0: write_checkpoint {re.escape(message)}"):
        write_checkpoint(tmp_path / "file", {"model.layers.0": layer}, "mixtral")
    assert not any(tensor.is_meta for tensor in [*layer.state_dict().values(), *block.state_dict().values()])
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("mixtral", "fp8_block", "experts.gate_up_proj: a slice of rows of weights quantized as fp8_block"),
        ("longcat_flash", "int4", "experts.gate_up_proj has 4 matrices of zeros that the block does not use"),
    ],
)
def test_quantized_experts_that_do_not_fit_a_block(name: str, format: str, message: str) -> None:
    block = block_of(name)
    layer = MoE(config_of_block(block)).requires_grad_(False)
    quantize_experts(layer, format)
    with pytest.raises(ValueError, match=message):
        layer.to_transformers(block)
    assert not any(tensor.is_meta for tensor in [*layer.state_dict().values(), *block.state_dict().values()])
