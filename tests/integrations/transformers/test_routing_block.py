"""Recorded and replayed routing in models of transformers with `experts_implementation="maxmoe"`."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import maxmoe
from maxmoe.nn import RoutingRecord
from support.replaced_models import IDS, PRESETS, assert_same, enable_checkpointing, replaced, small_model, step
from support.slow_cases import by_default
from support.small_models import STANDARD_MODELS, blocks_of

# Others have no experts implementations: their blocks must be replaced. Inkling is refused below.
FAMILIES = [preset for preset in PRESETS if preset in STANDARD_MODELS and preset not in ("llama4", "inkling")]


def ours(preset: str, **overrides: Any) -> Any:
    model = small_model(preset, **overrides)
    model.set_experts_implementation("maxmoe")
    return model


def recorded(model: nn.Module) -> RoutingRecord:
    with maxmoe.record_routing(model) as record, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return record


def rotated(record: RoutingRecord) -> RoutingRecord:
    """Other experts than the router selects, and no expert for some slots."""
    calls = {}
    for path, (ids,) in record.calls.items():
        moved = (ids + 1) % 6
        moved[0, 2, 1] = moved[2, -1] = -2
        calls[path] = [moved]
    return RoutingRecord(calls)


def assert_same_ids(got: RoutingRecord, expected: RoutingRecord) -> None:
    assert got.calls.keys() == expected.calls.keys()
    assert all(torch.equal(ids, expected.calls[path][0]) for path, (ids,) in got.calls.items())


def assert_same_gradients(model: nn.Module, record: RoutingRecord, expected: dict[str, Tensor]) -> None:
    """The backward comes after the replay."""
    model.zero_grad()
    with maxmoe.replay_routing(model, record):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(gradients, {name: expected[name] for name in gradients}, None, 1e-12)


@pytest.mark.parametrize("preset", by_default(FAMILIES, ["deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "zaya"]))
def test_the_ids_are_those_of_the_family(preset: str) -> None:
    """The record has the ids that the family's router passes to its experts; a replay gives the family's values."""
    eager, model = small_model(preset), ours(preset)
    seen = []
    for block in blocks_of(eager).values():

        def see(_experts: object, arguments: tuple[Tensor, ...]) -> None:
            _, ids, weights = arguments
            seen.append(ids.masked_fill(weights == 0, 8) if preset == "zaya" else ids.clone())  # skipped there

        block.experts.register_forward_pre_hook(see)
    expected = step(eager, IDS)
    with maxmoe.record_routing(model) as record:
        assert_same(step(model, IDS), expected, None)
    for (ids,), own in zip(record.calls.values(), seen, strict=True):
        assert preset != "zaya" or (own == 8).any()
        assert torch.equal(ids.flatten(0, 1), own.to(ids.dtype)) and ids.shape[:2] == IDS.shape
    with maxmoe.record_routing(model) as again, maxmoe.replay_routing(model, record):
        assert_same(step(model, IDS), expected, None)
    assert_same_ids(again, record)
    for (ids,) in again.calls.values():
        ids[:, :2] = -1  # a cached prefix, of which a server reports no route
    with pytest.raises(ValueError, match="has no route for 6 of 21 tokens"), maxmoe.replay_routing(model, again):
        step(model, IDS)
    with maxmoe.replay_routing(model, again, missing="natural"):
        assert_same(step(model, IDS), expected, None)


@pytest.mark.parametrize("make", [ours, replaced])
def test_a_router_without_the_logits_of_shared_experts_replays_nothing(make: Callable[[str], Any]) -> None:
    model = make("inkling")
    record = recorded(model)
    with (
        pytest.raises(ValueError, match="replay_routing needs the logits of the shared experts"),
        maxmoe.replay_routing(model, record),
    ):
        step(model, IDS)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixtral": lambda chosen: chosen.exp() / chosen.exp().sum(-1, keepdim=True),
    "deepseek_v3": lambda chosen: 2.5 * chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True),
}


@pytest.mark.parametrize("preset", WEIGHTS)
def test_other_experts_beside_loops(preset: str) -> None:
    """Values, and gradients of router, experts and everything else, beside the family's loops over given experts."""
    eager, model = small_model(preset), ours(preset)
    record = rotated(recorded(model))
    for (ids,), block in zip(record.calls.values(), blocks_of(eager).values(), strict=True):
        logits: list[Tensor] = []
        block.gate.register_forward_hook(lambda _router, _x, outputs, logits=logits: logits.append(outputs[0]))

        def given(_experts: object, arguments: tuple[Tensor, ...], ids: Tensor = ids, logits: Any = logits) -> Any:
            x, _, _ = arguments
            ids = ids.flatten(0, 1).long()
            chosen = logits.pop().double().gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
            weights = WEIGHTS[preset](chosen).nan_to_num().masked_fill(ids < 0, 0.0)
            return x, ids.clamp_min(0), weights  # expert 0 with the weight 0 for none

        block.experts.register_forward_pre_hook(given)
    expected = step(eager, IDS)
    with maxmoe.replay_routing(model, record):
        got = step(model, IDS)
    assert_same(got, expected, None)
    assert any((got[name] - value).abs().max() > 1e-3 for name, value in step(model, IDS).items())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_recomputed_layers_and_adapters() -> None:
    """Replay under transformers' gradient checkpointing, with a backward after the replay, and inside of PEFT."""
    peft = pytest.importorskip("peft")
    model = ours("qwen3_moe")
    record = rotated(recorded(model))
    with maxmoe.replay_routing(model, record):
        expected = step(model, IDS)
    enable_checkpointing(model, use_reentrant=False)
    with maxmoe.replay_routing(model, record):
        assert_same(step(model, IDS), expected, None, 1e-12)
    assert_same_gradients(model, record, expected)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=targets, target_modules=["q_proj"]))
    of_adapted = RoutingRecord({f"base_model.model.{path}": ids for path, ids in record.calls.items()})
    with maxmoe.record_routing(adapted) as again, maxmoe.replay_routing(adapted, of_adapted):
        logits = adapted(input_ids=IDS, use_cache=False).logits
    assert_same({"logits": logits.detach()}, {"logits": expected["logits"]}, None, 1e-12)  # adapters begin with zero
    assert_same_ids(again, of_adapted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_experts_that_are_recomputed_alone(use_reentrant: bool) -> None:
    """They have what their block and their router had kept for the forward, also after the replay."""
    model = ours("qwen3_moe")
    own, record = recorded(model), rotated(recorded(model))
    natural = step(model, IDS)
    with maxmoe.replay_routing(model, record):
        expected = step(model, IDS)
    for block in blocks_of(model).values():
        block.experts.forward = partial(checkpoint, block.experts.forward, use_reentrant=use_reentrant)
    with maxmoe.record_routing(model) as again:
        assert_same(step(model, IDS), natural, None, 1e-12)
    assert_same_ids(again, own)
    if not use_reentrant:  # refused in a replay
        assert_same_gradients(model, record, expected)


def test_keywords_of_a_block_have_any_order() -> None:
    block = blocks_of(ours("zaya"))["model.layers.0"]
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    with maxmoe.record_routing(block) as record:
        block(prev_router_hidden_states=None, hidden_states=x)
    assert record.calls[""][0].shape[:2] == x.shape[:2]


def test_copies_made_within_a_context_are_outside_of_it() -> None:
    model = ours("mixtral")
    record = recorded(model)
    expected = model(input_ids=IDS, use_cache=False).logits
    with maxmoe.record_routing(model) as again:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for copied in copies:
            assert torch.equal(copied(input_ids=IDS, use_cache=False).logits, expected)
    assert len(again) == 0
    for copied in copies:
        with maxmoe.replay_routing(copied, rotated(record)):
            assert not torch.equal(copied(input_ids=IDS, use_cache=False).logits, expected)


def test_other_models_are_refused() -> None:
    model = small_model("mixtral")
    message = r'^MixtralForCausalLM has no maxmoe.MoE layers, and no .* with experts_implementation="maxmoe"$'
    with pytest.raises(ValueError, match=message), maxmoe.record_routing(model):
        pass
    model.set_experts_implementation("maxmoe")
    record = recorded(model)
    fewer = RoutingRecord({path: [ids[:, 1:]] for path, (ids,) in record.calls.items()})
    message = r"^call 1 of model.layers.0.mlp has tokens of shape \(3, 7\), the record \(3, 6\)$"
    with pytest.raises(ValueError, match=message), maxmoe.replay_routing(model, fewer):
        model(input_ids=IDS, use_cache=False)
    of_all = RoutingRecord({path: [ids + 1] for path, (ids,) in record.calls.items()})
    message = r"^the ids of model.layers.0.mlp must be in \[-2, num_experts \(6\)\), got from 1 to 6$"
    with pytest.raises(ValueError, match=message), maxmoe.replay_routing(model, of_all):
        pass
