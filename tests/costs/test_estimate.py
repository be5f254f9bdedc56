"""`maxmoe.costs.estimate` against collectives, saved tensors and parameters of real ranks, to the byte."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, ZeroComputation
from maxmoe.costs import Estimate, Explanation, estimate, explain
from maxmoe.models import DecoderConfig, DecoderOutput
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support import adapted_decoders
from support.counted_collectives import CountedCollectives
from support.dispatched_layer import FAMILIES, Batch, make_batch, make_layer, take_step
from support.measured_step import PRESET_LAYOUTS, MeasuredStep, by_kind_and_axis, measured_steps
from support.moved_experts import free_moves
from support.parallel_decoder import BATCH, BLOCK, CONFIG, LENGTH, MOE, MeshRules, decoder, loss
from support.run_ranks import run_ranks
from support.slow_cases import by_default


def loss_of(output: DecoderOutput) -> Tensor:
    return loss(output, torch.zeros(output.logits.shape[:2], dtype=torch.int64))


def estimated(model: nn.Module, layout: MeshRules, **options: Any) -> Estimate:
    sizes = {"batch_size": BATCH, "sequence_length": LENGTH}
    return estimate(model, Mesh.planned(layout.sizes), layout.rules, **{**sizes, "loss": loss_of, **options})


def assert_equal(found: Estimate, explanation: Explanation, steps: list[MeasuredStep]) -> None:
    said = {parameter.name: (parameter.local_shape, parameter.local_bytes) for parameter in explanation.parameters}
    for step in steps:
        assert by_kind_and_axis(*found.traffic) == step.collectives
        assert said == step.parameters
        assert found.memory["parameters"] == sum(part for _, part in step.parameters.values())
        assert found.memory["activations"] == step.kept_bytes


# Half of the slots select zero-computation experts, whose rows are not sent.
NOTHING = replace(MOE, zero_computation=ZeroComputation(zero=2, copy=4, constant=2), shared_expert_gate=False)
NO_SHARED: dict[str, Any] = {"num_shared_experts": 0, "shared_expert_gate": False}
PARTS = ("attention", "dispatch", "experts", "feed_forward", "norms", "shared_experts")
CONFIGS: dict[str, DecoderConfig] = {
    "every part": CONFIG,
    "MoE block": BLOCK,
    "zero-computation experts": replace(BLOCK, moe=NOTHING),
    "latent experts": replace(CONFIG, moe=replace(MOE, latent_size=4)),
    "latent experts alone": replace(CONFIG, moe=replace(MOE, latent_size=4, **NO_SHARED)),
    "weights on the input, drops": replace(
        CONFIG, moe=replace(MOE, apply_weights_to="input", expert_bias=False, buffer_factor=2.0, **NO_SHARED)
    ),
    "parts recomputed": replace(CONFIG, recompute=PARTS),
    "blocks recomputed": replace(CONFIG, recompute=("blocks",)),
    "tied embeddings, five blocks": replace(CONFIG, num_layers=5, num_dense_layers=2, tie_embeddings=True),
}


class Case(NamedTuple):
    """A step on a mesh; three chunks of 32 tokens have 11, 11 and 10."""

    layout: MeshRules
    dispatch: Dispatch = "ring_of_experts"
    config: str = "every part"
    num_chunks: int = 1
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return ", ".join(map(str, self))


EXPERT, BOTH = MeshRules("ep-as-dp", {"expert": 2}), MeshRules("default", {"fsdp": 2, "tensor": 2})
CONTEXT = MeshRules("cp-as-ep", {"context": 2})
BY_DEFAULT = [
    Case(EXPERT, "least_loaded", "MoE block"),
    Case(EXPERT, "gather_weights", "MoE block"),
    Case(MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), config="MoE block"),
    Case(BOTH, "auto", "latent experts"),
    Case(EXPERT, "ragged_all_to_all", "zero-computation experts"),
    Case(EXPERT, "ring_of_experts", "parts recomputed"),
    Case(CONTEXT, "ring_of_experts", "MoE block", 3, torch.bfloat16),
    Case(CONTEXT, "ragged_all_to_all", "MoE block", 2, torch.bfloat16),  # routing is balanced in each chunk
]
CASES = [
    *BY_DEFAULT,
    *(Case(EXPERT, dispatch) for dispatch in STRATEGIES),
    *(Case(layout) for layout in [*PRESET_LAYOUTS, MeshRules("ep-as-dp", {"data": 2, "fsdp": 2})]),
    *(Case(MeshRules("cp-as-ep", {"context": 2, "expert": 2}), dispatch) for dispatch in STRATEGIES),
    *(Case(EXPERT, "ring_of_experts", name) for name in CONFIGS),
    Case(EXPERT, "ragged_all_to_all", "weights on the input, drops"),
    Case(EXPERT, "ragged_all_to_all", "parts recomputed"),
    *(
        Case(BOTH, "auto", name)
        for name in ("latent experts alone", "blocks recomputed", "tied embeddings, five blocks")
    ),
]
DISTINCT = [case for index, case in enumerate(CASES) if case not in CASES[:index]]


@pytest.mark.parametrize("case", by_default(DISTINCT, BY_DEFAULT), ids=str)
def test_a_step_is_what_torch_runs_and_autograd_saves(case: Case) -> None:
    config, options = CONFIGS[case.config], {"dispatch": case.dispatch, "num_chunks": case.num_chunks}
    model = decoder(config).to(device="meta", dtype=case.dtype)
    explanation = explain(model, Mesh.planned(case.layout.sizes), case.layout.rules, **options)
    steps = measured_steps(case.layout, config, dtype=case.dtype, **options)
    assert_equal(estimated(model, case.layout, **options), explanation, steps)


def adapted() -> Any:
    """Experts with adapters, and a trained embedding, so that the backward passes through all modules."""
    model = adapted_decoders.adapted(CONFIG).base_model.model
    model.embedding.weight.requires_grad_(True)
    return model


def quantized() -> Any:
    return adapted_decoders.quantized("mxfp4", CONFIG)


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(
    ("make", "layout"), [(adapted, EXPERT), (quantized, MeshRules("shard-exp-on-fsdp", {"fsdp": 2}))]
)
def test_adapters_and_quantized_experts(make: Any, layout: MeshRules) -> None:
    options: dict[str, Any] = {"dispatch": "ring_of_experts", "allow_unused": True}
    explanation = explain(make(), Mesh.planned(layout.sizes), layout.rules, **options)
    steps = measured_steps(layout, dispatch="ring_of_experts", make=make)
    assert_equal(estimated(make(), layout, **options), explanation, steps)


# Parameters, gradients, optimizers


def states_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments that an optimizer has made."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim())


def test_the_state_of_an_optimizer_is_what_it_makes() -> None:
    model, one = decoder(BLOCK), MeshRules("pure-fsdp", {})
    muon = Muon(parameter_groups(model))
    muon.step()  # makes the state of all parameters, without any gradient
    assert estimated(model, one, optimizer="muon").memory["state of muon"] == states_of(muon)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw = torch.optim.AdamW(model.parameters())
    adamw.step()
    memory = estimated(model, one).memory
    assert memory["state of adamw"] == states_of(adamw)
    assert memory["parameters"] == memory["gradients"] == sum(p.nbytes for p in model.parameters())


# Loads that are not balanced


def skewed_batch(config: MoEConfig, imbalance: float, num_ranks: int) -> Batch:
    """A batch in which each rank sends the share of `estimate` to the first expert, and the others evenly."""
    batch = make_batch(config, "even")
    slots = batch.x.shape[0] * batch.x.shape[1] * config.top_k // num_ranks
    hot = round(slots * (imbalance - 1) / (num_ranks - 1))
    of_rank = torch.cat([torch.zeros(hot, dtype=torch.int64), torch.arange(slots - hot) % config.num_experts])
    return replace(batch, experts=of_rank.repeat(num_ranks).view(*batch.x.shape[:2], config.top_k))


IN_CHUNKS: dict[str, Any] = {"buffer_factor": 1.25, "overflow": "chunks"}
IMBALANCES: list[tuple[Dispatch, float, dict[str, Any]]] = [
    ("ragged_all_to_all", 4.0, {}),
    ("ragged_all_to_all", 4.0, IN_CHUNKS),
    ("least_loaded", 1.1, {}),
    ("least_loaded", 2.5, {}),
]


def test_a_load_that_is_not_balanced() -> None:
    """All-to-alls of the rank that has the first expert; with an imbalance of P it gets all rows."""
    family = FAMILIES["mixtral"]
    batches = [skewed_batch(family, imbalance, 4) for _, imbalance, _ in IMBALANCES]

    def check() -> list[list[int]]:
        mesh, found = Mesh({"expert": 4}), []
        for (dispatch, _, buffer), batch in zip(IMBALANCES, batches, strict=True):
            layer = parallelize(make_layer(replace(family, **buffer)), mesh, "ep-as-dp", dispatch=dispatch)
            part = token_sharding(mesh, LogicalRules.load("ep-as-dp")).slices(batch.x.shape[:2])
            with free_moves(), CountedCollectives(mesh) as counted:
                take_step(layer, batch.part(part))
            found.append(counted.counts["all-to-all", "expert"])
        return found

    real, *_ = run_ranks(check, 4)
    for (dispatch, imbalance, buffer), batch, expected in zip(IMBALANCES, batches, real, strict=True):
        sizes = {"batch_size": batch.x.shape[0], "sequence_length": batch.x.shape[1]}
        options: dict[str, Any] = {"dispatch": dispatch, "imbalance": imbalance, **sizes}
        options["inputs"] = lambda *shape: (
            torch.empty(*shape, family.hidden_size, dtype=torch.float64, requires_grad=True),
        )
        with free_moves():
            layer = make_layer(replace(family, **buffer))
            traffic = estimate(layer, Mesh.planned({"expert": 4}), "ep-as-dp", **options).traffic
        assert by_kind_and_axis(*traffic)["all-to-all", "expert"] == expected
        assert any("moved experts" in row.purpose for row in traffic) == (imbalance == 2.5)


@pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])
def test_the_memory_of_an_overflow_is_that_of_a_balanced_step(dispatch: Dispatch) -> None:
    """Without a buffer, one rank has four times the rows."""

    def peak(imbalance: float, **buffer: Any) -> int:
        config = replace(CONFIG, num_layers=2, num_dense_layers=0, max_sequence_length=128)
        model = decoder(replace(config, moe=replace(MOE, intermediate_size=32, **NO_SHARED, **buffer)))
        options = {"dispatch": dispatch, "imbalance": imbalance, "batch_size": 4, "sequence_length": 128}
        memory = estimated(model, MeshRules("ep-as-dp", {"expert": 4}), **options).memory
        return memory["activations"] + memory["temporary"]

    balanced = peak(1.0, **IN_CHUNKS)
    assert 0 <= balanced - peak(1.0) <= 2 * 2 * 8  # two statistics of each layer
    assert peak(4.0, **IN_CHUNKS) <= 1.1 * balanced < 1.4 * balanced < peak(4.0)


@pytest.mark.parametrize(
    ("rules", "sizes", "options", "message"),
    [
        ("pure-fsdp", {}, {"optimizer": "sgd"}, r"^optimizer must be one of adamw, muon, got 'sgd'$"),
        ("cp-as-ep", {"data": 2}, {"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ("cp-as-ep", {"data": 3}, {}, r"batch_size \(8\) must be divisible by data=3"),
        ("cp-as-ep", {"context": 2, "expert": 2}, {"sequence_length": 7}, r"sequence_length \(7\) must be divisible"),
        (
            "pure-fsdp",
            {},
            {"sequence_length": 99},
            r"sequence_length \(99\) must not exceed max_sequence_length \(16\)",
        ),
        ("ep-as-dp", {"expert": 4}, {"num_chunks": 0}, "num_chunks must be a positive int, got 0"),
        ("ep-as-dp", {"expert": 4}, {"imbalance": 4.5}, r"ranks that share the experts \(4\), got 4\.5"),
        ("ep-as-dp", {"expert": 4}, {"imbalance": 0.5}, r"imbalance must be a finite float >= 1\.0, got 0\.5"),
        ("pure-fsdp", {"fsdp": 2}, {"imbalance": 2.0}, r"ranks that share the experts \(1\), got 2\.0"),
    ],
)
def test_errors(rules: str, sizes: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimated(decoder(), MeshRules(rules, sizes), allow_unused=True, **options)


def test_one_rank_sends_nothing() -> None:
    alone = estimated(decoder(), MeshRules("default", {"fsdp": 1}))
    assert alone.traffic == () and "TFLOP" in str(alone)
