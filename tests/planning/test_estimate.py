"""`maxmoe.planning.estimate` against the memory and collectives of real steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maxmoe import MoEConfig, replay_routing
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.planning import Estimate, estimate
from maxmoe.sharding import LogicalRules, Mesh
from support.measured_step import (
    PRESET_LAYOUTS,
    balanced_routing,
    by_kind_and_axis,
    kept_tensors,
    measured_steps,
    num_bytes,
)
from support.parallel_decoder import BATCH, CONFIG, LENGTH, MOE, MeshRules, decoder, token_spec

RECOMPUTED = replace(CONFIG, tie_embeddings=True, recompute=("blocks",))


def estimated(config: DecoderConfig, layout: MeshRules, dtype: torch.dtype = torch.float64, **options: Any) -> Estimate:
    options = {"batch_size": BATCH, "sequence_length": LENGTH, **options}
    return estimate(decoder(config).to(dtype), Mesh.planned(layout.sizes), layout.rules, **options)


# Activations, in one process


def kept_by_a_step(model: Decoder, tokens: Tensor) -> int:
    routing = balanced_routing(model, tokens.shape)
    with replay_routing(model, routing), kept_tensors(model.parameters()) as kept:
        output = model(tokens)
        token_loss = F.cross_entropy(output.logits.flatten(0, 1), tokens.flatten().clone())
    assert token_loss.requires_grad
    return num_bytes(kept)


WIDE = MoEConfig(hidden_size=64, intermediate_size=48, num_experts=8, top_k=2, num_shared_experts=1)
VARIANTS = {
    "balance loss": replace(WIDE, load_balance_loss_weight=0.1),
    "z-loss, shared gate": replace(WIDE, score_function="sigmoid", router_z_loss_weight=0.1, shared_expert_gate=True),
    "weights on the input": replace(WIDE, apply_weights_to="input", num_shared_experts=0),
    "copy experts": replace(WIDE, num_zero_experts=3, num_copy_experts=5, router_z_loss_weight=0.1),
    "constant experts": replace(WIDE, num_copy_experts=5, num_constant_experts=3, num_shared_experts=0),
    "latent experts": replace(WIDE, latent_size=24, router_z_loss_weight=0.1),
    "latent, weights on the input": replace(WIDE, latent_size=24, apply_weights_to="input", num_shared_experts=0),
    "scored shared experts": replace(
        WIDE, score_function="sigmoid", num_shared_experts=3, shared_expert_scores=True, router_scale=True
    ),
    "norms": replace(WIDE, latent_size=24, latent_in_norm=True, latent_out_norm=True, expert_norm=True),
    "scale of the router": replace(WIDE, router_scale=True, selection="logits"),
    "no gate, biases": replace(WIDE, gated=False, activation="relu2", expert_bias=True, router_bias=True),
}


def wide_decoder(moe: MoEConfig, dtype: torch.dtype, **changes: Any) -> Decoder:
    sizes: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    config = DecoderConfig(vocab_size=101, hidden_size=64, num_layers=3, num_dense_layers=1, moe=moe, **sizes)
    return Decoder(replace(config, **changes), dtype=dtype)


def activations(model: Decoder, batch_size: int, length: int) -> tuple[int, int]:
    """Bytes that are kept, and parts that are recomputed."""
    memory = estimate(model, Mesh.planned({}), "ep-as-dp", batch_size=batch_size, sequence_length=length).memory
    return memory["activations"], memory["recomputed activations"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.sampled(2))],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_what_autograd_saves(variant: str, dtype: torch.dtype) -> None:
    model = wide_decoder(VARIANTS[variant], dtype)
    kept = kept_by_a_step(model, torch.randint(101, (2, 40)))
    assert activations(model, 2, 40) == (kept, 0)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sampled(1))], ids=str)
@pytest.mark.parametrize("variant", ["z-loss, shared gate", "weights on the input", "no gate, biases"])
def test_what_each_policy_keeps(variant: str, dtype: torch.dtype) -> None:
    moe, tokens = VARIANTS[variant], torch.randint(101, (2, 40))
    usual = kept_by_a_step(wide_decoder(moe, dtype), tokens)
    parts = {"attention": 3, "dispatch": 2, "experts": 2, "feed_forward": 1, "norms": 7}
    parts |= {"shared_experts": 2} if moe.num_shared_experts else {}
    for policy in (*((name,) for name in parts), ("dispatch", "experts"), tuple(parts)):
        model = wide_decoder(moe, dtype, recompute=policy)
        kept = kept_by_a_step(model, tokens)
        planned, again = activations(model, 2, 40)
        assert planned == kept, policy
        if policy != ("norms",) and len(policy) < 3:  # a norm keeps its argument, a separate tensor
            assert again * parts[policy[0]] == usual - kept, policy


def test_recomputed_blocks_keep_their_input_and_one_block_its_activations() -> None:
    model = wide_decoder(VARIANTS["balance loss"], torch.float32, recompute=("blocks",))
    tokens, x = torch.randint(101, (2, 40)), torch.randn(2, 40, 64, requires_grad=True)
    inside = []
    for block in wide_decoder(VARIANTS["balance loss"], torch.float32).blocks:
        with kept_tensors([*block.parameters(), x]) as kept:
            block(x)
        inside.append(num_bytes(kept) + x.nbytes)
    # The routing of the other blocks is small and not saved by autograd.
    kept, again = activations(model, 2, 40)
    assert kept == pytest.approx(kept_by_a_step(model, tokens), rel=0.01)
    assert kept + again == pytest.approx(kept_by_a_step(model, tokens) + max(inside), rel=0.003)


def test_what_it_cannot_know_is_an_error() -> None:
    dense = replace(WIDE, implementation="dense")
    with pytest.raises(ValueError, match="implementation='dense'"):
        activations(wide_decoder(dense, torch.float32), 2, 40)
    mixed = wide_decoder(WIDE, torch.float32)
    mixed.norm.bfloat16()
    message = r"one dtype, got torch\.bfloat16 of norm\.weight and torch\.float32 of embedding\.weight"
    with pytest.raises(ValueError, match=message):
        activations(mixed, 2, 40)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"data": 2}, {"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"data": 3}, {}, r"batch_size \(8\) must be divisible by data=3"),
        ({"context": 2, "expert": 2}, {"sequence_length": 7}, r"sequence_length \(7\) must be divisible by context=2"),
    ],
)
def test_batches_that_are_refused(sizes: dict[str, int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimated(CONFIG, MeshRules("cp-as-ep", sizes), **options)


# Parameters, gradients, optimizers


def states_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments that an optimizer of torch has made."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim())


def test_an_optimizer_that_is_not_counted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^optimizer must be one of adamw, muon, got 'sgd'$"):
        estimated(CONFIG, MeshRules("pure-fsdp", {}), optimizer="sgd")


def test_the_state_of_adamw_is_that_of_torch() -> None:
    model = decoder()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    memory = estimated(CONFIG, MeshRules("pure-fsdp", {})).memory
    assert memory["state of adamw"] == states_of(optimizer)
    assert memory["parameters"] == memory["gradients"] == sum(p.nbytes for p in model.parameters())
    assert memory["gathered parameters"] == 0


def test_the_state_of_muon_is_that_of_ours() -> None:
    optimizer = Muon(parameter_groups(decoder()))
    optimizer.step()  # makes the state of all parameters, without any gradient
    memory = estimated(CONFIG, MeshRules("pure-fsdp", {}), optimizer="muon").memory
    assert memory["state of muon"] == states_of(optimizer)


# Real ranks


def strategies(layout: MeshRules) -> list[Dispatch]:
    """Strategies that differ: on some meshes no token is sent, or all ranks have all experts."""
    ((_, plan),) = make_plan(decoder(), Mesh.planned(layout.sizes), LogicalRules.load(layout.rules)).layers.values()
    return list(STRATEGIES) if plan.expert_axes else ["ring_of_experts"]


def masks_of_sharded_sequences(layout: MeshRules) -> int:
    """Bytes of the attention masks, which no module declares: local queries by all keys."""
    _, length_axes = token_spec(Mesh.planned(layout.sizes), LogicalRules.load(layout.rules))
    num_ranks = Mesh.planned(layout.sizes).size(*length_axes)
    return torch.float64.itemsize * CONFIG.num_layers * LENGTH * LENGTH // num_ranks if length_axes else 0


def assert_as_planned(
    layout: MeshRules,
    dispatch: Dispatch,
    num_chunks: int = 1,
    config: DecoderConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
) -> None:
    planned = estimated(config, layout, dtype, dispatch=dispatch, num_chunks=num_chunks)
    expected = by_kind_and_axis(*planned.traffic)
    for step in measured_steps(layout, config, dispatch=dispatch, num_chunks=num_chunks, dtype=dtype):
        assert step.collectives == expected
        assert sum(part for _, part in step.parameters.values()) == planned.memory["parameters"]
        # Between forward and backward nothing is gathered.
        masks = 0 if "attention" in config.recompute else masks_of_sharded_sequences(layout)
        assert step.kept_bytes == planned.memory["activations"] + masks


REPLICAS = MeshRules("ep-as-dp", {"data": 2, "fsdp": 2})
CASES = [(layout, dispatch) for layout in [*PRESET_LAYOUTS, REPLICAS] for dispatch in strategies(layout)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "dispatch"), CASES, ids=str)
def test_a_step_is_what_torch_runs_and_autograd_saves(layout: MeshRules, dispatch: Dispatch) -> None:
    assert_as_planned(layout, dispatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "dispatch"), [(2, "ring_of_experts"), (2, "ragged_all_to_all"), (7, "ring_of_experts")]
)
def test_weights_on_the_input_counted_drops_and_sixteen_bits(number: int, dispatch: Dispatch) -> None:
    changes: dict[str, Any] = {"num_shared_experts": 0, "shared_expert_gate": False, "buffer_factor": 2.0}
    moe = replace(MOE, apply_weights_to="input", expert_bias=False, **changes)
    assert_as_planned(PRESET_LAYOUTS[number], dispatch, config=replace(CONFIG, moe=moe), dtype=torch.bfloat16)


# On two ranks by default: what the presets do with other axes is compared above.
TWO_RANKS = MeshRules("ep-as-dp", {"expert": 2})
PRESET_CASES = [(layout, dispatch) for layout in PRESET_LAYOUTS for dispatch in strategies(layout)]
STRATEGY_CASES = [pytest.param(TWO_RANKS, each, marks=pytest.mark.sampled(1)) for each in strategies(TWO_RANKS)]
STRATEGY_CASES += [pytest.param(*case, marks=pytest.mark.sampled(0)) for case in PRESET_CASES]
each_strategy = pytest.mark.parametrize(("layout", "dispatch"), STRATEGY_CASES, ids=str)

# Half of the slots select zero-computation experts, whose rows are not sent.
NOTHING = replace(MOE, num_zero_experts=2, num_copy_experts=4, num_constant_experts=2, shared_expert_gate=False)


@each_strategy
def test_experts_that_compute_nothing_send_nothing(layout: MeshRules, dispatch: Dispatch) -> None:
    assert_as_planned(layout, dispatch, config=replace(CONFIG, moe=NOTHING))


@each_strategy
def test_rows_of_latent_experts_are_narrow(layout: MeshRules, dispatch: Dispatch) -> None:
    alone = {"num_shared_experts": 0, "shared_expert_gate": False}
    for changes in ({}, alone):
        assert_as_planned(layout, dispatch, config=replace(CONFIG, moe=replace(MOE, latent_size=4, **changes)))


# Three chunks of 32 tokens are of 11, 11 and 10; in all-to-alls of two chunks routing is balanced in each.
@pytest.mark.parametrize(("dispatch", "num_chunks"), [("ring_of_experts", 3), ("ragged_all_to_all", 2)])
def test_chunks(dispatch: Dispatch, num_chunks: int) -> None:
    assert_as_planned(MeshRules("cp-as-ep", {"context": 2}), dispatch, num_chunks)


PARTS = ("attention", "dispatch", "experts", "feed_forward", "norms", "shared_experts")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "dispatch", "num_chunks"),
    [(0, "auto", 1), (3, "ragged_all_to_all", 1), (5, "ring_of_experts", 2), (7, "auto", 1)],
)
def test_recomputed_parts(number: int, dispatch: Dispatch, num_chunks: int) -> None:
    assert_as_planned(PRESET_LAYOUTS[number], dispatch, num_chunks, replace(CONFIG, recompute=PARTS))


RECOMPUTED_CASES: list[tuple[int, Dispatch]] = [
    (0, "auto"),
    (3, "ragged_all_to_all"),
    (6, "ring_of_experts"),
    (7, "auto"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "dispatch"), RECOMPUTED_CASES)
def test_collectives_of_recomputed_blocks(number: int, dispatch: Dispatch) -> None:
    layout = PRESET_LAYOUTS[number]
    expected = by_kind_and_axis(*estimated(RECOMPUTED, layout, dispatch=dispatch).traffic)
    step = measured_steps(layout, RECOMPUTED, dispatch=dispatch)[0]
    # The recomputation ends before the sum of the dense block's parts: nothing in the backward needs it.
    tokens = BATCH * LENGTH // Mesh.planned(layout.sizes).size(*token_axes(layout))
    whole = torch.float64.itemsize * tokens * CONFIG.hidden_size
    last_sum = {"all-reduce": [1, whole], "reduce-scatter": [1, whole // 2]}
    assert step.collectives.keys() == expected.keys()
    for key, count in step.collectives.items():
        ahead = [planned - real for planned, real in zip(expected[key], count, strict=True)]
        assert ahead in ([0, 0], last_sum.get(key[0])), key


def token_axes(layout: MeshRules) -> list[str]:
    spec = token_spec(Mesh.planned(layout.sizes), LogicalRules.load(layout.rules))
    return [axis for axes in spec for axis in axes]


# As text


def test_the_tables_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    result = estimated(CONFIG, MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}))
    memory, traffic = str(result).split("\n\n")
    assert memory.splitlines()[-1].split()[0] == traffic.splitlines()[-1].split()[0] == "total"
    assert traffic.splitlines()[-1].split()[1] == str(sum(line.times for line in result.traffic))
    assert len(traffic.splitlines()) == len(result.traffic) + 3
    assert all(size > 0 or name == "recomputed activations" for name, size in result.memory.items())


def test_one_rank_moves_nothing() -> None:
    assert estimated(CONFIG, MeshRules("default", {"fsdp": 1})).traffic == ()
