"""`estimate` for least-loaded experts, against the bytes that a step sends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.parallel.dispatch import collectives, least_loaded
from maxmoe.planning import estimate
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import FAMILIES, NUM_EXPERTS, Batch, make_batch, make_layer, take_step
from support.moved_experts import make_moves_free
from support.run_ranks import run_ranks

EP = LogicalRules.load("ep-as-dp")


@pytest.fixture(autouse=True)
def moves_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    make_moves_free(monkeypatch)


def skewed_batch(config: MoEConfig, imbalance: float, num_ranks: int) -> Batch:
    """A batch in which each rank sends the share of `estimate` to the first expert, and the others evenly."""
    batch = make_batch(config, "even")
    slots = batch.x.shape[0] * batch.x.shape[1] * config.top_k // num_ranks
    hot = round(slots * (imbalance - 1) / (num_ranks - 1))
    of_rank = torch.cat([torch.zeros(hot, dtype=torch.int64), torch.arange(slots - hot) % NUM_EXPERTS])
    return replace(batch, experts=of_rank.repeat(num_ranks).view(*batch.x.shape[:2], config.top_k))


def exchanged_bytes(layer: MoE, batch: Batch) -> list[int]:
    """Bytes with other ranks in each all-to-all of the dispatch of a step: the larger of sent and received."""
    exchanged: list[int] = []
    exchange = collectives.all_to_all

    def count(output: Any, rows: Any, receive: Any, send: Any, what: str, *, group: Any) -> Any:
        most = max(sum(splits) - splits[group.rank()] for splits in (receive, send))
        exchanged.append(most * rows.itemsize * rows.shape[1:].numel())
        return exchange(output, rows, receive, send, what, group=group)

    with patch.object(collectives, "all_to_all", count):
        take_step(layer, batch)
    return exchanged


def quantized_layer(config: MoEConfig) -> MoE:
    layer = make_layer(config)
    layer.experts.requires_grad_(False)
    maxmoe.quantize_experts(layer, "int8")
    return layer


def test_it_sends_what_estimate_says_at_an_imbalance() -> None:
    """The bytes of each all-to-all, of the rank that sends or receives most."""
    parts = ("dispatch", "experts")
    cases: list[tuple[str, float, Callable[[MoEConfig], MoE], tuple[str, ...], int]] = [
        ("mixtral", 1.0, make_layer, (), 1),
        ("mixtral", 1.1, make_layer, (), 1),
        ("deepseek_v3", 1.5, make_layer, parts, 1),
        ("gpt_oss", 2.5, make_layer, (), 1),
        ("llama4", 4.0, make_layer, parts, 1),
        ("deepseek_v3", 3.0, quantized_layer, (), 1),
    ]
    batches = [skewed_batch(FAMILIES[family], imbalance, 4) for family, imbalance, *_ in cases]

    def check() -> list[list[int]]:
        mesh, found = Mesh({"expert": 4}), []
        for (family, _, make, recompute, num_chunks), batch in zip(cases, batches, strict=True):
            options: dict[str, Any] = {"num_chunks": num_chunks, "recompute": recompute}
            layer = parallelize(make(FAMILIES[family]), mesh, EP, dispatch="least_loaded", **options)
            part = token_sharding(mesh, EP).slices(batch.x.shape[:2])
            found.append(exchanged_bytes(layer, batch.part(part)))
        return found

    by_rank = run_ranks(check, 4)
    for number, ((family, imbalance, make, recompute, num_chunks), batch) in enumerate(
        zip(cases, batches, strict=True)
    ):
        layer = make(FAMILIES[family])
        maxmoe.set_recompute(layer, recompute)
        sizes = {"batch_size": batch.x.shape[0], "sequence_length": batch.x.shape[1], "num_chunks": num_chunks}
        plan = estimate(layer, Mesh.planned({"expert": 4}), EP, dispatch="least_loaded", imbalance=imbalance, **sizes)
        planned = [traffic for traffic in plan.traffic if traffic.kind == "all-to-all"]
        most = [max(counts) for counts in zip(*(found[number] for found in by_rank), strict=True)]
        assert sum(traffic.times for traffic in planned) == len(most), (family, imbalance)
        assert sum(traffic.bytes for traffic in planned) == sum(most), (family, imbalance)
        sends_weights = any("weights of moved experts" in traffic.purpose for traffic in planned)
        assert sends_weights == (imbalance > 1.15)


def test_an_expert_moves_only_if_its_rows_are_worth_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def purposes(imbalance: float) -> set[str]:
        layer, step = make_layer(FAMILIES["mixtral"]), {"batch_size": 8, "sequence_length": 8}
        mesh, options = Mesh.planned({"expert": 4}), {"dispatch": "least_loaded", "imbalance": imbalance}
        return {traffic.purpose for traffic in estimate(layer, mesh, EP, **options, **step).traffic}

    assert "weights of moved experts, forward" in purposes(2)
    monkeypatch.setattr(least_loaded, "FLOP_PER_BYTE", {"cpu": 0, "cuda": 1000})
    assert "weights of moved experts, forward" not in purposes(2)


@pytest.mark.parametrize(
    ("dispatch", "imbalance", "rules", "message"),
    [
        ("least_loaded", 4.5, "ep-as-dp", r"ranks that share the experts \(4\), got 4\.5"),
        ("least_loaded", 0.5, "ep-as-dp", r"imbalance must be a finite float >= 1\.0, got 0\.5"),
        ("least_loaded", "2", "ep-as-dp", r"imbalance must be a finite float >= 1\.0, got '2'"),
        ("ring_of_experts", 2.0, "ep-as-dp", r"imbalance \(2\.0\) needs dispatch='least_loaded' .* 'ring_of_experts'"),
        ("least_loaded", 2.0, "ep-tp", r"needs dispatch='least_loaded' and tokens that are sent, got .* over \(\)"),
    ],
)
def test_an_imbalance_that_is_not_possible(dispatch: str, imbalance: float, rules: str, message: str) -> None:
    layer, mesh = make_layer(FAMILIES["mixtral"]), Mesh.planned({"expert": 4})
    step: dict[str, Any] = {"batch_size": 8, "sequence_length": 8, "dispatch": dispatch, "imbalance": imbalance}
    with pytest.raises(ValueError, match=message):
        estimate(layer, mesh, rules, **step)
