"""Evaluation communicates for the hidden states only, not for losses and statistics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, MoEFeedForward, MoEStats, ZeroComputation, parallelize
from maxmoe.nn import RoutingRecord
from maxmoe.nn.windows import BufferUse
from maxmoe.parallel import token_sharding
from maxmoe.parallel.apply.input_gradients import InputGradientCheck
from maxmoe.parallel.dispatch.partial_sums import PartialSums
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.counted_collectives import CountedCollectives
from support.parallel_decoder import BLOCK, MeshRules, decoder
from support.parallel_decoder import batch as token_ids
from support.run_ranks import run_cases

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
BALANCE = {"load_balance_loss_weight": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {  # each with another one of LAYOUTS
    "sequence": BALANCE,
    "batch": {**BALANCE, "load_balance_scope": "batch"},
    "step": {**BALANCE, "load_balance_scope": "step"},
    "z-loss": {"router_z_loss_weight": 0.2},
    "sign": {"score_correction_bias": True, "correction_bias_update_rate": 0.1},
    "quantile": {
        "score_function": "sigmoid",
        "score_correction_bias": True,
        "correction_bias_update_rate": 0.1,
        "correction_bias_rule": "quantile",
    },
    "shared and latent": {"num_shared_experts": 1, "latent_size": 4, **BALANCE},
    "without products": {"zero_computation": ZeroComputation(zero=1, copy=1, constant=1), **BALANCE},
    "buffer": {"buffer_factor": 0.75},
    "capacity": {"implementation": "dense", "capacity_factor": 1.0},
}
DATA: tuple[MeshRules, Dispatch] = (MeshRules("ep-as-dp", {"data": 2}), "auto")
LAYOUTS: list[tuple[MeshRules, Dispatch]] = [
    DATA,
    (MeshRules("ep-as-dp", {"expert": 2}), "ring_of_experts"),
    (MeshRules("ep-as-dp", {"expert": 2}), "ragged_all_to_all"),
    (MeshRules("ep-as-dp", {"expert": 2}), "least_loaded"),
    (MeshRules("ep-as-dp", {"expert": 2}), "gather_weights"),
    (MeshRules("ep-tp", {"expert": 2}), "ring_of_experts"),
    (MeshRules("ep-tp", {"expert": 2}), "ragged_all_to_all"),
    (MeshRules("default", {"tensor": 2}), "auto"),
    (MeshRules("default", {"context": 2}), "auto"),
    (MeshRules("pure-fsdp", {"fsdp": 2}), "auto"),
]
SCOPES = ("sequence", "batch", "step")
MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def make(kind: type[MoE] = MoE, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(MoEConfig(**SIZES, **options), dtype=torch.float64)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    return x, torch.rand(4, 6, generator=generator) < 0.8


class NoLosses:
    """Replaces losses and statistics, so that a layer computes its hidden states only."""

    are_recorded = False

    def __call__(self, routing: Any, use: BufferUse, *_: Any, **__: Any) -> tuple[Tensor, MoEStats]:
        return routing.weights.new_zeros(()), MoEStats(use.dropped, use.dropped, use.dropped)


@contextmanager
def hidden_states_alone() -> Iterator[None]:
    with (
        patch.object(PartialSums, "all_reduce_dropped", lambda _region, dropped: dropped),
        patch.object(InputGradientCheck, "enter", lambda *_: None),
    ):
        yield


def counted(mesh: Mesh, call: Callable[[], Any]) -> dict[tuple[str, str], list[int]]:
    with CountedCollectives(mesh) as collectives:
        call()
    return dict(collectives.counts)


def test_a_layer_communicates_for_its_hidden_states_alone() -> None:
    x, mask = batch()

    def check(kind: type[MoE], name: str, layout: MeshRules, dispatch: Dispatch) -> None:
        mesh, options = Mesh(layout.sizes), OPTIONS[name]
        part = token_sharding(mesh, layout.rules).slices(x.shape[:2])
        arguments = (x[part], mask[part])
        with hidden_states_alone():
            alone = parallelize(make(kind, **options), mesh, layout.rules, dispatch=dispatch)
            alone.losses = NoLosses()
            with torch.no_grad():
                needed = counted(mesh, lambda: alone(*arguments))
        assert bool(needed) == (layout != DATA[0])
        layer = parallelize(make(kind, **options), mesh, layout.rules, dispatch=dispatch)
        maxmoe.StatsAccumulator(layer)
        for mode, disabled in MODES.items():
            with disabled():
                assert counted(mesh, lambda: layer(*arguments)) == needed, mode
                with maxmoe.record_routing(layer) as record:
                    assert counted(mesh, lambda: layer(*arguments)) == needed, f"recorded, {mode}"
                with maxmoe.replay_routing(layer, record):
                    assert counted(mesh, lambda: layer(*arguments)) == needed, f"replayed, {mode}"
        assert sum(times for times, _ in counted(mesh, lambda: layer(*arguments)).values()) > sum(
            times for times, _ in needed.values()
        )

    kinds = [MoEFeedForward, MoE] * 5
    run_cases(check, 2, [(*case, *layout) for *case, layout in zip(kinds, OPTIONS, LAYOUTS, strict=True)])


TOGETHER = [("sequence", "z-loss", "without products"), ("batch", "sign", "buffer"), ("step", "quantile")]


def test_one_rank_evaluates_alone_where_ranks_share_no_work() -> None:
    """Forwards of a layer and of a model, and generation, on the axis `data`. Afterwards all ranks train as before."""

    def check(*names: str) -> None:
        mesh, rules = Mesh(DATA[0].sizes), DATA[0].rules
        options = {option: value for name in names for option, value in OPTIONS[name].items()}
        config = replace(BLOCK, moe=MoEConfig(**{**SIZES, "hidden_size": 16, **options}))
        tokens = token_ids()[0][token_sharding(mesh, rules).slices(token_ids()[0].shape)]
        results = []
        for evaluates in (False, True):
            model = parallelize(decoder(config), mesh, rules)
            layer = parallelize(make(MoEFeedForward, **options), mesh, rules)
            accumulators = [maxmoe.StatsAccumulator(module) for module in (model, layer)]
            for _ in range(2):
                if evaluates and dist.get_rank() == 0:
                    with torch.no_grad():
                        layer(batch()[0])
                        model.eval()(tokens)
                        model.train().generate(tokens[:1, :2], 2)
                output = model(tokens)
                (output.logits.square().mean() + output.aux_loss).backward()
                layer(batch()[0]).square().mean().backward()
            stats = [accumulator.update() for accumulator in accumulators]
            gradients = [parameter.grad.full_tensor() for parameter in (*model.parameters(), *layer.parameters())]
            biases = [buffer for module in (model, layer) for buffer in module.buffers()]
            counts = [list(each.layers.values()) for each in stats]
            results.append([*gradients, *biases, *(each.aux_loss for each in stats), counts])
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)

    run_cases(check, 2, TOGETHER)


def test_losses_and_statistics_without_a_backward_are_those_of_the_tokens_of_this_rank() -> None:
    """With the scope "step" the loss equals the loss of the scope "batch": an evaluation belongs to no step."""
    x, mask = batch()
    options: dict[str, Any] = {**BALANCE, "router_z_loss_weight": 0.2, "score_function": "sigmoid"}

    def check(scope: str, layout: MeshRules, dispatch: Dispatch) -> None:
        mesh = Mesh(layout.sizes)
        part = token_sharding(mesh, layout.rules).slices(x.shape[:2])
        of_one = make(**options, load_balance_scope="batch" if scope == "step" else scope)(x[part], mask[part])
        layer = parallelize(make(**options, load_balance_scope=scope), mesh, layout.rules, dispatch=dispatch)
        maxmoe.StatsAccumulator(layer)
        layer(x[part], mask[part]).aux_loss.backward()  # a step has begun
        with torch.no_grad():
            output = layer(x[part], mask[part])
        for found, expected in zip((output.aux_loss, *output.stats), (of_one.aux_loss, *of_one.stats), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

    run_cases(check, 2, [(SCOPES[number % 3], *layout) for number, layout in enumerate(LAYOUTS)])


def test_the_slots_that_the_ranks_drop_add_up() -> None:
    x, _ = batch()
    everything = RoutingRecord({"": [torch.zeros(*x.shape[:2], 2, dtype=torch.int64)]})  # all slots to one expert

    def check(layout: MeshRules, dispatch: Dispatch) -> None:
        mesh = Mesh(layout.sizes)
        part = token_sharding(mesh, layout.rules).slices(x.shape[:2])
        layer = parallelize(make(buffer_factor=0.25), mesh, layout.rules, dispatch=dispatch)
        record = RoutingRecord({"": [everything.calls[""][0][part]]})
        with maxmoe.replay_routing(layer, record):
            of_all = layer(x[part]).stats.dropped
        with torch.no_grad(), maxmoe.replay_routing(layer, record):
            total = layer(x[part]).stats.dropped
        dist.all_reduce(total)
        assert of_all > 0 and total == of_all

    run_cases(check, 2, LAYOUTS[:2])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # a warning of torch, under no_grad
def test_a_reentrant_checkpoint_trains_although_its_forward_has_no_gradients() -> None:
    """The returned loss is the loss of all ranks; under no_grad a forward is an evaluation as well."""
    x, _ = batch()

    def check(scope: str) -> None:
        mesh, rules = Mesh({"data": 2}), DATA[0].rules
        part = x[token_sharding(mesh, rules).slices(x.shape[:2])]
        layer = parallelize(make(**BALANCE, load_balance_scope=scope), mesh, rules)
        maxmoe.StatsAccumulator(layer)
        expected = layer(part).aux_loss
        checkpointed = partial(checkpoint, lambda tokens: layer(tokens).aux_loss, use_reentrant=True)
        loss = checkpointed(part.clone().requires_grad_())
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        loss.backward()
        with torch.no_grad():
            assert not counted(mesh, lambda: checkpointed(part))

    run_cases(check, 2, [(scope,) for scope in SCOPES])
