"""Saliency of experts: a loop over tokens and experts, models of transformers, several ranks, and pruning by it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe import MoE, parallelize
from maxmoe.convert.saliency import record_saliency
from maxmoe.convert.surgery import prune_experts
from maxmoe.parallel import token_sharding
from maxmoe.reference.layer import PROJECTIONS, project, routing
from maxmoe.reference.operators import feed_forward
from maxmoe.sharding import Mesh
from support.moe_layers import COMPUTE, DEEPSEEK, FAMILIES, LAYERS, make, padded, tokens
from support.replaced_models import IDS, replaced, small_model
from support.run_ranks import fake_rank, run_cases

MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]]).bool()


def by_loop(layer: MoE, x: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weight times norm of each expert, and its number of tokens, in float64."""
    config, parameters = layer.config, layer.state_dict()
    _, weights, experts, _ = routing(x[token_mask], config, parameters)
    rows = x[token_mask] if config.latent_size is None else project(x[token_mask], parameters["latent_in.weight"])
    sums, counts = torch.zeros(2, config.num_experts, dtype=torch.float64)
    for row, of_token, ids in zip(rows, weights, experts.tolist(), strict=True):
        for weight, expert in zip(of_token, ids, strict=True):
            if expert < config.num_experts:
                stacks = (parameters.get(f"experts.{name}") for name in PROJECTIONS)
                matrices = [None if stack is None else stack[expert] for stack in stacks]
                sums[expert] += weight * feed_forward(row, matrices, **config.activation_arguments).norm()
                counts[expert] += 1
    return sums, counts


NAMES = [*FAMILIES, "latent", "copies, weights on the input", "all to one"]


@pytest.mark.parametrize("options", [*(LAYERS[name] for name in NAMES), *COMPUTE.values()], ids=[*NAMES, *COMPUTE])
def test_a_loop_in_float64_gives_the_same(options: dict[str, Any]) -> None:
    """Over two calls, with NaN in the padding; the first is recomputed. The outputs are the same."""
    layer, model = make(**options), nn.Module()
    model.add_module("part", layer)
    batches, runner = [padded(layer, mask) for mask in (MASK, ~MASK)], layer.runner
    expected = [layer(x, mask).hidden_states for x, mask in zip(batches, (MASK, ~MASK), strict=True)]
    with record_saliency(model) as saliency:
        output = checkpoint(layer, batches[0], MASK, use_reentrant=False)
        output.hidden_states.sum().backward()
        assert torch.equal(output.hidden_states, expected[0])
        assert torch.equal(layer(batches[1], ~MASK).hidden_states, expected[1])
    sums = [by_loop(layer, x, mask) for x, mask in zip(batches, (MASK, ~MASK), strict=True)]
    total, counts = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
    assert torch.equal(saliency.tokens_per_expert["part"], counts.long()) and (counts > 0).any()
    torch.testing.assert_close(saliency.means["part"], total / counts.clamp_min(1), rtol=1e-12, atol=0)
    assert layer.runner is runner


LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "each rank by itself": ("", {}, {}),
    "ring": ("ep-as-dp", {"expert": 2}, {"dispatch": "ring_of_experts", "num_chunks": 2}),
    "ragged": ("ep-as-dp", {"expert": 2}, {"dispatch": "ragged_all_to_all"}),
    "least loaded": ("ep-as-dp", {"expert": 2}, {"dispatch": "least_loaded"}),
    "partial sums": ("ep-tp", {"expert": 2}, {}),
    "partial experts": ("default", {"tensor": 2}, {}),
    "context": ("default", {"context": 2}, {}),
    "gathered": ("pure-fsdp", {"fsdp": 2}, {}),
}
ON_RANKS = {name: {**LAYERS[name], "hidden_size": 8, "intermediate_size": 8} for name in ("latent", "longcat_flash")}


def test_ranks_with_other_tokens_add_their_sums() -> None:
    torch.manual_seed(0)
    layers = {name: make(**options) for name, options in ON_RANKS.items()}
    x, mask = padded(layers["latent"], MASK[[0, 2]]), MASK[[0, 2]]

    def check(name: str, layout: str) -> None:
        layer, (rules, sizes, options) = copy.deepcopy(layers[name]), LAYOUTS[layout]
        sums, counts = by_loop(layer, x, mask)
        part: tuple[slice, ...] = (slice(dist.get_rank(), dist.get_rank() + 1),)
        if rules:
            mesh = Mesh(sizes)
            layer = parallelize(layer, mesh, rules, **options)
            part = token_sharding(mesh, rules).slices(x.shape[:2])
        with torch.no_grad(), record_saliency(layer) as saliency:
            layer(x[part], mask[part])
        assert torch.equal(saliency.tokens_per_expert["moe"], counts.long())
        torch.testing.assert_close(saliency.means["moe"], sums / counts.clamp_min(1), rtol=1e-12, atol=0)

    run_cases(check, 2, [(name, layout) for layout in LAYOUTS for name in ON_RANKS])


def test_replaced_blocks_of_transformers() -> None:
    model, path, inputs = replaced("mixtral"), "model.layers.1.mlp", []
    layer = MoE.from_transformers(small_model("mixtral").get_submodule(path))
    model.get_submodule(path).register_forward_pre_hook(lambda _block, given: inputs.append(given[0]))
    with torch.no_grad(), record_saliency(model) as saliency:
        model(IDS)
    sums, counts = by_loop(layer, inputs[0], torch.ones_like(IDS, dtype=torch.bool))
    assert torch.equal(saliency.tokens_per_expert[path], counts.long())
    torch.testing.assert_close(saliency.means[path], sums / counts.clamp_min(1), rtol=1e-6, atol=0)


def test_the_lowest_experts_are_pruned() -> None:
    """In each layer, in each group of its router."""
    layers = [make(**DEEPSEEK, top_k=2), make(**LAYERS["plain"])]
    model = nn.ModuleList(layers)
    before = [layer.experts.down_proj.clone() for layer in layers]
    with record_saliency(model) as saliency:
        for layer in layers:
            layer(tokens(layer))
    lowest = [[2 * group + int(pair.argmin()) for group, pair in enumerate(saliency.means["0"].view(3, 2))]]
    lowest.append(saliency.means["1"].argsort()[:3].tolist())
    assert [ids.tolist() for ids in saliency.lowest(3).values()] == lowest
    prune_experts(model, saliency.lowest(3))
    for layer, old, ids in zip(layers, before, lowest, strict=True):
        assert torch.equal(layer.experts.down_proj, old[[expert for expert in range(6) if expert not in ids]])
    for count in (4, 6):
        with pytest.raises(
            ValueError, match=rf"count must be below the 6 experts of 0 and .* its 3 groups, got {count}"
        ):
            saliency.lowest(count)


def test_models_whose_saliency_is_not_known() -> None:
    with pytest.raises(
        ValueError, match=r"^Linear must have layers of type MoELayer, got none: in .*, call replace_moe_bl"
    ):
        record_saliency(nn.Linear(2, 2)).__enter__()
    with fake_rank(0, 2):
        layer = parallelize(make(buffer_factor=0.5), Mesh({"expert": 2}), "ep-as-dp")
        with pytest.raises(ValueError, match=r"^moe must drop no slots on a mesh, .*buffer_factor 0.5: record"):
            record_saliency(layer).__enter__()
