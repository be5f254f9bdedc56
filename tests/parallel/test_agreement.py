"""Ranks that differ get an error that names the difference, before a collective hangs or aborts."""

import re
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.run_ranks import run_ranks

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}


def message_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is what is tested
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({"top_k": 1}, torch.float32, r"the module \(root\): rank 0 has .*top_k=2.* rank 1 has .*top_k=1"),
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
        assert rules.startswith("the ranks must agree on the rules: rank 0 has LogicalRules([")
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
