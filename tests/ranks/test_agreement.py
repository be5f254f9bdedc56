"""Ranks that differ get an error that names the difference, before a collective hangs or aborts."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import LogicalRules, Mesh
from support.run_ranks import run_ranks

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}


def message_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is tested below
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        (
            {"top_k": 1, "normalization": "none"},
            torch.float32,
            r"the module \(root\): rank 0 has .*top_k=2.* rank 1 has .*top_k=1",
        ),
        (
            {"intermediate_size": 6},
            torch.float32,
            "rank 0 has .*intermediate_size=4.* rank 1 has .*intermediate_size=6",
        ),
        ({}, torch.float64, "router.weight: rank 0 has shape .*float32, .*, rank 1 has shape .*float64"),
    ],
    ids=["top_k", "intermediate_size", "dtype"],
)
def test_other_layers(change: dict[str, Any], dtype: torch.dtype, message: str) -> None:
    def check() -> str:
        mesh = Mesh({"fsdp": 2})
        options = {**SIZES, **(change if mesh.rank == 1 else {})}
        layer = MoE(MoEConfig(**options), dtype=dtype if mesh.rank == 1 else torch.float32)
        return message_of(parallelize, layer, mesh, "pure-fsdp")

    first, second = run_ranks(check, 2)
    assert first == second and re.match(f"^the ranks must agree on .*{message}", first), first


def test_other_rules_and_other_meshes() -> None:
    def check() -> tuple[str, str]:
        mesh = Mesh({"fsdp": 2})
        changes = [("exp", "fsdp")] if mesh.rank == 1 else []
        rules = LogicalRules.load("pure-fsdp").override(changes)
        sizes = {"fsdp": 2} if mesh.rank == 1 else {"expert": 2}
        return message_of(parallelize, MoE(MoEConfig(**SIZES)), mesh, rules), message_of(Mesh, sizes)

    for rules, sizes in run_ranks(check, 2):
        assert re.fullmatch(
            r"the ranks must agree on rule \d+: rank 0 has \w+: [\w -]+, rank 1 has \w+: [\w -]+", rules
        )
        assert sizes == (
            "the ranks must agree on the sizes of the mesh: rank 0 has {'expert': 2}, rank 1 has {'fsdp': 2}"
        )


def test_a_buffer_that_one_rank_lacks() -> None:
    def check() -> str:
        mesh = Mesh({"fsdp": 2})
        layer = MoE(MoEConfig(**SIZES))
        if mesh.rank == 1:
            layer.register_buffer("extra", torch.zeros(()))
        return message_of(parallelize, layer, mesh, "pure-fsdp")

    first, _ = run_ranks(check, 2)
    assert first.startswith("the ranks must agree on extra: rank 0 has nothing, rank 1 has shape ()")


class Branches(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def test_another_order_of_modules() -> None:
    """Broadcasts and all-gathers run in the order of the modules."""

    def check() -> str:
        mesh = Mesh({"fsdp": 2})
        names = ("one", "two") if mesh.rank == 0 else ("two", "one")
        return message_of(parallelize, Branches(*names), mesh, "pure-fsdp")

    for message in run_ranks(check, 2):
        assert message.startswith("the order must be the same on all ranks: rank 0 has ")
        assert "the module branches.one where rank 1 has the module branches.two" in message


class Adapted(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_an_adapter_that_one_rank_lacks() -> None:
    def check() -> str:
        mesh = Mesh({"fsdp": 2})
        layer = MoE(MoEConfig(**SIZES))
        if mesh.rank == 1:
            layer.router = Adapted(layer.router)
        return message_of(parallelize, layer, mesh, "pure-fsdp")

    first, second = run_ranks(check, 2)
    assert first == second and first.startswith("the ranks must agree on ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch": "ring_of_experts"}, "dispatch: rank 0 has 'auto', rank 1 has 'ring_of_experts'"),
        ({"num_chunks": 2}, "num_chunks: rank 0 has 1, rank 1 has 2"),
        ({"mesh": {"expert": 2}}, r"the mesh: rank 0 has Mesh\(fsdp=2\), rank 1 has Mesh\(expert=2\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_arguments(options: dict[str, Any], message: str) -> None:
    def check() -> str:
        meshes = {str(sizes): Mesh(sizes) for sizes in ({"fsdp": 2}, {"expert": 2})}
        given = {"mesh": {"fsdp": 2}, **(options if dist.get_rank() == 1 else {})}
        mesh = meshes[str(given.pop("mesh"))]
        with pytest.raises(ValueError, match=f"^the ranks must agree on {message}$") as caught:
            parallelize(MoE(MoEConfig(**SIZES)), mesh, "shard-exp-on-fsdp", **given)
        return str(caught.value)

    first, second = run_ranks(check, 2)
    assert first == second


def test_experts_that_an_axis_does_not_divide() -> None:
    moe = MoEConfig(**{**SIZES, "num_experts": 6})
    decoder = DecoderConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, moe=moe, max_sequence_length=8)
    strategies: list[tuple[str, Any]] = [
        ("ep-as-dp", "ring_of_experts"),
        ("ep-as-dp", "ragged_all_to_all"),
        ("ep-tp", "auto"),
    ]

    def check() -> list[str]:
        mesh = Mesh({"expert": 4})
        return [
            message_of(lambda: parallelize(module, mesh, rules, dispatch=dispatch))  # noqa: B023  called at once
            for rules, dispatch in strategies
            for module in (MoE(moe), Decoder(decoder))
        ]

    first, *others = run_ranks(check, 4)
    assert others == [first] * 3
    for message, path in zip(first, ["the layer", "blocks.0.feed_forward"] * 3, strict=True):
        rule = "the axes ('expert',) of the rule 'activation_exp'"
        assert message.startswith(f"{path}: num_experts must be divisible by {rule}: 6 is not divisible by 4; ")
