"""LoRA of the library peft on the layer, through `target_parameters`: trained, merged, saved."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from maxmoe import MoE
from support.moe_layers import EVERYTHING, Options, make, tokens

RANK, ALPHA = 2, 6
EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
SHARED = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
EACH = ("router.weight", *EXPERTS, *SHARED)


class Model(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.moe = layer

    def forward(self, x: Tensor) -> Tensor:
        hidden_states, aux_loss, _ = self.moe(x)
        return hidden_states.square().mean() + aux_loss


def adapted(layer: MoE, targets: tuple[str, ...], **options: Any) -> PeftModel:
    """LoRA whose second matrix is not zero, as after some training."""
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=list(targets), init_lora_weights=False, **options
    )
    return get_peft_model(Model(layer), config)


def factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of LoRA of every adapted parameter."""
    wrappers = [module for module in model.modules() if hasattr(module, "parameter_name")]
    return {
        wrapper.parameter_name: (wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight)
        for wrapper in wrappers
    }


@pytest.mark.parametrize("options", [{}, {"implementation": "dense"}], ids=["sparse", "dense"])
def test_experts_are_matrices_from_in_to_out(options: Options) -> None:
    """Expert e computes x @ (W[e] + alpha / r * A[e].T @ B[e].T), A reading its input and B writing its output."""
    layer = make(**options)
    x, num_experts = tokens(layer), layer.config.num_experts
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    model = adapted(layer, EXPERTS)
    for name, (a, b) in factors(model).items():
        weight = state[f"experts.{name}"]
        assert a.shape == (num_experts * RANK, weight.shape[1]) and b.shape == (weight.shape[2], num_experts * RANK)
        for expert in range(num_experts):
            columns = torch.arange(RANK) * num_experts + expert
            delta = a[expert * RANK : (expert + 1) * RANK].T @ b[:, columns].T
            weight[expert] += ALPHA / RANK * delta
    expected = torch.func.functional_call(make(**options), state, (x,))
    got = model.base_model.model.moe(x)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-12, atol=1e-12)


def test_trains_the_adapters_alone() -> None:
    layer = make(load_balance_loss_weight=0.3, **EVERYTHING)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    parameters = dict(layer.named_parameters())
    model = adapted(layer, EACH)
    x = tokens(layer, 2, 16)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(20):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(
        parameter.grad is None and torch.equal(parameter, before[name]) for name, parameter in parameters.items()
    )
    assert all(matrix.grad.any() for pair in factors(model).values() for matrix in pair)


@pytest.mark.parametrize(
    "targets", [EXPERTS, EACH, ("router.weight",), SHARED], ids=["experts", "each", "router", "shared"]
)
def test_merged_it_is_the_layer_again(targets: tuple[str, ...]) -> None:
    layer = make(load_balance_loss_weight=0.3, **EVERYTHING)
    x, names = tokens(layer), set(layer.state_dict())
    without = Model(layer)(x).item()
    model = adapted(layer, targets)
    expected = model(x)
    merged = model.merge_and_unload()
    assert type(merged.moe) is MoE and set(merged.moe.state_dict()) == names
    torch.testing.assert_close(merged(x), expected, rtol=1e-12, atol=1e-12)
    assert abs(expected.item() - without) > 1e-3


def test_the_layer_around_the_adapters_works_as_before() -> None:
    layer = make(correction_bias_update_rate=0.25, **EVERYTHING)
    x = tokens(layer)
    bias = layer.router.score_correction_bias.clone()
    adapted(layer, EACH)
    layer.update_correction_bias(layer(x).stats.tokens_per_expert)
    assert not torch.equal(layer.state_dict()["router.base_layer.score_correction_bias"], bias)
    assert layer.declaration == MoE(layer.config, device="meta").declaration
    with pytest.raises(
        ValueError,
        match=r"^x must have the dtype of the parameters \(torch.float64\) outside of autocast, got torch.float32$",
    ):
        layer(x.float())


def test_bfloat16_with_adapters_in_float32() -> None:
    layer = make(torch.bfloat16, **EVERYTHING)
    model = adapted(layer, EACH)
    assert {matrix.dtype for pair in factors(model).values() for matrix in pair} == {torch.float32}
    model(tokens(layer)).backward()
    assert all(matrix.grad.any() for pair in factors(model).values() for matrix in pair)
