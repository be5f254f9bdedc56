"""The loss of a training script on a mesh: `mean_over_tokens`, with padding and gradient accumulation."""

from typing import Any

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.nn import count_tokens
from maxmoe.parallel import token_group, token_sharding
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_ranks

CONFIG = MoEConfig(
    hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, score_function="sigmoid", num_shared_experts=1
)
SHAPE = (8, 12)


def layer(config: MoEConfig) -> MoE:
    torch.manual_seed(0)
    return MoE(config, dtype=torch.float64)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*SHAPE, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(SHAPE, generator=generator) < 0.7
    mask[3] = False
    return x, mask


def step(model: Any, x: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """The mean of a loss per token, and everything that the layer returns; one backward."""
    output = model(x, mask)
    loss = maxmoe.mean_over_tokens(output.hidden_states.square().sum(-1), mask, **options)
    (loss + output.aux_loss).backward()
    return loss, output.aux_loss, *output.stats


def test_gradient_accumulation_is_one_large_batch() -> None:
    """Micro-batches with different numbers of valid tokens."""

    def check() -> None:
        mesh, rules = Mesh({"fsdp": 2, "expert": 2}), "ep-as-dp"
        x, mask = batch()
        part = token_sharding(mesh, rules).slices(SHAPE)
        whole, ours = layer(CONFIG), parallelize(layer(CONFIG), mesh, rules)
        expected, *_ = step(whole, x, mask)
        tokens = token_group(mesh, rules)
        micro_batches = [(x[part][:, :5], mask[part][:, :5]), (x[part][:, 5:], mask[part][:, 5:])]
        num_tokens = count_tokens(mask[part], tokens=tokens)
        assert int(num_tokens) == int(mask.sum())
        losses = [step(ours, *micro, tokens=tokens, num_tokens=num_tokens)[0] for micro in micro_batches]
        assert_same(torch.stack(losses).sum(), expected)
        for path, parameter in whole.named_parameters():
            assert_same(ours.get_parameter(path).grad.full_tensor(), parameter.grad, path)

    run_ranks(check, 4)


def test_a_mean_over_the_tokens_of_one_rank_is_too_large() -> None:
    """The mistake that the docstring of `parallelize` warns of."""

    def check() -> None:
        mesh, rules = Mesh({"fsdp": 2}), "pure-fsdp"
        x, _ = batch()
        whole, ours = layer(CONFIG), parallelize(layer(CONFIG), mesh, rules)
        step(whole, x, None)
        ours(x[token_sharding(mesh, rules).slices(SHAPE)]).hidden_states.square().sum(-1).mean().backward()
        for path, parameter in whole.named_parameters():
            assert_same(ours.get_parameter(path).grad.full_tensor(), 2 * parameter.grad, path)

    run_ranks(check, 2)


def test_no_token_and_wrong_masks() -> None:
    losses = torch.randn(2, 3, requires_grad=True)
    loss = maxmoe.mean_over_tokens(losses, torch.zeros(2, 3).bool())
    loss.backward()
    assert loss == 0 and losses.grad is not None and torch.equal(losses.grad, torch.zeros(2, 3))
    assert maxmoe.mean_over_tokens(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32
    message = r"^token_mask must be bool of shape \(2, 3\), got torch.bool of shape \(6,\)$"
    with pytest.raises(ValueError, match=message):
        maxmoe.mean_over_tokens(losses, torch.ones(6).bool())
