"""Ranks that differ get an error that names the difference, before a collective hangs or sums what does not fit."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maxmoe import MoE, MoEConfig, parallelize, quantize_experts
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import LogicalRules, Mesh
from support.documented import noisy
from support.messages import error_of
from support.run_ranks import fake_rank, run_ranks

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}


def layer(is_other: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> MoE:
    """A layer; the changes are on one rank alone."""
    options = {**SIZES, **changes} if is_other else SIZES
    return MoE(MoEConfig(**options), dtype=dtype if is_other else torch.float32)


def with_buffer(is_other: bool) -> MoE:
    module = layer()
    if is_other:
        module.register_buffer("extra", torch.zeros(()))
    return module


def branches(is_other: bool) -> nn.Module:
    """Broadcasts and all-gathers run in the order of the modules."""
    names = ("two", "one") if is_other else ("one", "two")
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def quantized(is_other: bool) -> nn.Module:
    """Formats with codes and scales of the same shapes."""
    module = layer().requires_grad_(False)
    quantize_experts(module, "int8" if is_other else "fp8_row")
    return module


AGREE = "the ranks must agree on "
MODULES: list[tuple[Callable[[bool], nn.Module], str]] = [
    (
        partial(layer, top_k=1, normalization="none"),
        rf"{AGREE}.*the module \(root\): rank 0 has .*top_k=2.* rank 1 has .*top_k=1",
    ),
    (
        partial(layer, intermediate_size=6),
        f"{AGREE}.*rank 0 has .*intermediate_size=4.* rank 1 has .*intermediate_size=6",
    ),
    (partial(layer, dtype=torch.float64), f"{AGREE}.*router.weight: rank 0 has shape .*float32, .*, rank 1 .*float64"),
    (with_buffer, rf"{AGREE}extra: rank 0 has nothing, rank 1 has shape \(\)"),
    (quantized, f"{AGREE}.*fp8_row"),
    (branches, "the order must be the same on all ranks: rank 0 has .*the module one where rank 1 has the module two"),
]
# Arguments of `parallelize` on rank 1.
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"dispatch": "ring_of_experts"}, "dispatch: rank 0 has 'auto', rank 1 has 'ring_of_experts'$"),
    ({"num_chunks": 2}, "num_chunks: rank 0 has 1, rank 1 has 2$"),
    ({"recompute": ("experts",)}, "recompute"),
    ({"mesh": {"expert": 2}}, r"the mesh: rank 0 has Mesh\(fsdp=2\), rank 1 has Mesh\(expert=2\)$"),
    (
        {"rules": LogicalRules.load("shard-exp-on-fsdp").override([("exp", None)])},
        r"rule \d+: rank 0 has \w+: [\w -]+, rank 1 has \w+: [\w -]+$",
    ),
]


def test_ranks_that_differ() -> None:
    def check() -> list[str]:
        meshes = {str(sizes): Mesh(sizes) for sizes in ({"fsdp": 2}, {"expert": 2})}
        mesh = meshes["{'fsdp': 2}"]
        is_other = mesh.rank == 1
        messages = [error_of(parallelize, make(is_other), mesh, "pure-fsdp") for make, _ in MODULES]
        for options, _ in ARGUMENTS:
            given = {"mesh": {"fsdp": 2}, "rules": "shard-exp-on-fsdp", **(options if is_other else {})}
            given["mesh"] = meshes[str(given["mesh"])]
            messages.append(error_of(parallelize, layer(), **given))
        return [*messages, error_of(Mesh, {"fsdp": 2} if is_other else {"expert": 2})]

    first, second = run_ranks(check, 2)
    assert first == second
    of_meshes = "the sizes of the mesh: rank 0 has {'expert': 2}, rank 1 has {'fsdp': 2}$"
    expected = [message for _, message in MODULES]
    expected += [f"{AGREE}{message}" for message in (*(message for _, message in ARGUMENTS), of_meshes)]
    for message, pattern in zip(first, expected, strict=True):
        assert re.match(pattern, message, re.DOTALL), message


def test_experts_that_an_axis_does_not_divide() -> None:
    moe = MoEConfig(**{**SIZES, "num_experts": 6})
    decoder = DecoderConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, moe=moe, max_sequence_length=8)
    strategies = [("ep-as-dp", "ring_of_experts"), ("ep-as-dp", "ragged_all_to_all"), ("ep-tp", "auto")]

    rule = "the axes ('expert',) of the rule 'activation_exp'"
    with fake_rank(1, 4):
        mesh = Mesh({"expert": 4})
        for rules, dispatch in strategies:
            for module, path in ((MoE(moe), "the layer"), (Decoder(decoder), "blocks.0.feed_forward")):
                message = error_of(parallelize, module, mesh, rules, dispatch=dispatch)
                assert message.startswith(f"{path}: num_experts must be divisible by {rule}: 6 is not divisible by 4; ")


def test_ranks_with_the_same_tokens_must_route_alike() -> None:
    """If they do not, the backward is an error on all ranks: their parts would belong to different functions."""
    config = MoEConfig(hidden_size=6, intermediate_size=4, num_experts=8, top_k=2)

    def check() -> list[str]:
        messages = []
        for sizes, rules in (({"expert": 2}, "ep-tp"), ({"tensor": 2}, "default")):  # experts, or parts of experts
            torch.manual_seed(0)
            layer = parallelize(MoE(config, router=noisy(config)), Mesh(sizes), rules)
            x = torch.randn(2, 8, 6)
            layer(x).hidden_states.sum().backward()
            torch.manual_seed(dist.get_rank())
            output = layer(x).hidden_states.sum()
            with pytest.raises(RuntimeError, match="must route them alike") as error:
                output.backward()
            messages.append(str(error.value))
        return messages

    message = "got other experts on the ranks [1] of the group than on its rank 0: give them the same tokens and seeds"
    for messages in run_ranks(check, 2):
        assert len(messages) == 2 and all(error.endswith(message) for error in messages)
