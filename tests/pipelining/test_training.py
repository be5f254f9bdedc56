"""Optimizers, clipping, scalers, frozen stages, statistics and random routers of a pipeline beside one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe import StatsAccumulator, ZeroComputation, record_routing, set_aux_loss_scale
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import GradScaler, clip_grad_norm_
from maxmoe.sharding import Mesh
from support.parallel_decoder import batch, decoder
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.staged_decoder import (
    DEEPSEEK,
    MOE,
    SPLIT,
    TWO_BLOCKS,
    check_gradients,
    config,
    loss,
    part_of_micro_batches,
    staged,
    step_of,
    whole,
)

LATENT = replace(
    TWO_BLOCKS,
    moe=replace(
        DEEPSEEK.moe, num_groups=1, top_k_groups=1, latent_size=6, zero_computation=ZeroComputation(copy=3, constant=2)
    ),
)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices, and AdamW for the rest."""
    return Muon(parameter_groups(model), lr=1e-2, ns_dtype=torch.float64)


def test_training_steps_with_clipping_and_correction_biases() -> None:
    """Also of latents, and of experts that copy or are constant."""
    norms, model = [], decoder(LATENT)
    optimizer = muon(model)
    for _ in range(2):
        optimizer.zero_grad()
        step = step_of(model, *batch())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).detach())
        optimizer.step()
        model.update_correction_bias([counts for counts, _ in step.layers])
    assert min(norms) > 1
    expected = {key: value.detach() for key, value in model.state_dict().items()}

    def check() -> None:
        mesh = Mesh({"stage": 2, "expert": 2})
        run = staged(LATENT, mesh)
        optimizer = muon(run.model)
        for norm in norms:
            optimizer.zero_grad()
            found = run.step(*part_of_micro_batches(batch(), mesh))
            assert_same(run.clip_grad_norm_(1.0), norm, "norm")
            optimizer.step()
            run.update_correction_bias(found.stats)
        for key, value in run.model.state_dict().items():
            assert_same(whole(value), expected[key], key, tolerance=1e-9)

    run_ranks(check, 4)


def test_clipping_with_a_stage_without_trained_parameters() -> None:
    """The function refuses parameters of a stage, as another stage may have none; the method works on every stage."""
    model = frozen(TWO_BLOCKS, 0)
    step_of(model, *batch())
    expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    def check() -> None:
        mesh = Mesh({"stage": 2, "fsdp": 2})
        run = staged(frozen(TWO_BLOCKS, 0), mesh)
        run.step(*part_of_micro_batches(batch(), mesh))
        trained = [parameter for parameter in run.parameters() if parameter.requires_grad]
        assert bool(trained) == (mesh.coordinates()["stage"] == 1)
        for parameters in (list(run.parameters()), trained):
            with pytest.raises(ValueError, match=r"^parameters must not b.* call clip_grad_norm_ of the pipeline$"):
                clip_grad_norm_(parameters, 0.1)
        assert_same(run.clip_grad_norm_(0.1), expected_norm)
        check_gradients(run, expected)
        if mesh.rank == 3:
            trained[0].grad = None
        with pytest.raises(ValueError, match=r"^clip_grad_norm_: all ranks must have gradients of the same"):
            run.clip_grad_norm_(0.1)

    run_ranks(check, 4)


def frozen(config: DecoderConfig, stage: int | None) -> Decoder:
    """A decoder with the first half of the blocks frozen, with the embedding, or with the rest."""
    model = decoder(config)
    first = [f"blocks.{number}." for number in range(len(model.blocks) // 2)]
    for name, parameter in model.named_parameters():
        is_first = name.startswith(("embedding", *first))
        parameter.requires_grad_(stage is None or is_first == (stage == 1))
    return model


def test_frozen_stages() -> None:
    """The first stage is frozen, so that its hidden states require no gradient; then the last one."""
    gradients = [step_of(frozen(DEEPSEEK, stage), *batch()).gradients for stage in range(2)]

    def check(stage: int, schedule: str) -> None:
        blocks = [2, 2] if schedule == "1f1b" else None
        run = staged(frozen(DEEPSEEK, stage), Mesh({"stage": 2}), "default", schedule, blocks_per_stage=blocks)
        run.step(*batch())
        check_gradients(run, gradients[stage])

    run_cases(check, 2, [(0, "1f1b"), (1, "1f1b"), (0, SPLIT), (1, SPLIT)])


def trained(model: nn.Module, scaler: Any, backward: Callable[[], object], ranks: list[int | None]) -> Any:
    """Return scales and weights after a step for each of `ranks`: the rank with infinite gradients, or -1 for all."""
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.01), []
    for rank in ranks:
        backward()
        for parameter in model.parameters():
            if rank in (-1, dist.get_rank() if dist.is_initialized() else -1) and parameter.grad is not None:
                gradient = parameter.grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    return scales, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("axes", "stage"), [({"stage": 2}, 0), ({"stage": 2, "expert": 2}, None)], ids=["a stage is frozen", "experts"]
)
def test_all_ranks_skip_the_same_steps(axes: dict[str, int], stage: int | None) -> None:
    """Gradients are NaN on each rank in turn; a frozen stage has none, and takes part."""
    config, size = replace(TWO_BLOCKS, moe=MOE["mixtral"]), Mesh.planned(axes).num_ranks
    ranks = range(size)[0 if stage is None else size // 2 :]
    model, scaler = frozen(config, stage), torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward() -> None:
        scaled = {"aux_loss_scale": scaler.get_scale(), "loss": lambda *of: scaler.scale(loss(*of))}
        scaler.scale(torch.ones(()))
        step_of(model, *batch(), **scaled)

    expected_scales, expected = trained(model, scaler, backward, [None, *[-1 for _ in ranks], None])

    def check() -> None:
        mesh, scaler = Mesh(axes), GradScaler("cpu", init_scale=64.0)
        run = staged(frozen(config, stage), mesh, "ep-as-dp", loss=lambda *of: scaler.scale(loss(*of)))
        part = part_of_micro_batches(batch(), mesh.within_stage(), "ep-as-dp")
        losses = []

        def backward() -> None:
            set_aux_loss_scale(run.model, scaler.get_scale())
            losses.append(run.step(*part).loss / scaler.get_scale())

        scales, weights = trained(run.model, scaler, backward, [None, *ranks, None])
        assert scales == expected_scales
        assert losses[1] == losses[-1] < losses[0]
        for name, weight in weights.items():
            assert_same(whole(weight), expected[name], name)

    run_ranks(check, size)


def test_balance_over_the_step() -> None:
    """Each micro-batch is counted once, in the order of the backwards, also where a backward runs in two parts."""
    sizes = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, load_balance_loss_weight=0.3, load_balance_scope="step"))
    model = decoder(sizes)
    StatsAccumulator(model)
    gradients = step_of(model, *batch(), count=4).gradients

    def check(schedule: str) -> None:
        run = staged(sizes, Mesh({"stage": 2}), "default", schedule, num_micro_batches=4)
        StatsAccumulator(run.model)
        run.step(*batch())
        check_gradients(run, gradients)

    run_cases(check, 2, [("1f1b",), (SPLIT,)])


QUANTILE = config(
    "deepseek_v3", moe=replace(MOE["deepseek_v3"], num_groups=1, top_k_groups=1, correction_bias_rule="quantile")
)


def test_stats_accumulator_has_the_layers_of_all_stages() -> None:
    """In two blocks, the first stage has no layer."""
    wanted = {}
    for sizes in (DEEPSEEK, QUANTILE, TWO_BLOCKS):
        model = decoder(sizes)
        accumulator = StatsAccumulator(model)
        for _ in range(2):
            step_of(model, *batch())
        update = accumulator.update()
        wanted[sizes] = update, {name: bias for name, bias in model.state_dict().items() if "correction" in name}

    def check(schedule: str, sizes: DecoderConfig) -> None:
        expected, biases = wanted[sizes]
        run = staged(sizes, Mesh({"stage": 2}), "default", schedule)
        accumulator = StatsAccumulator(run.model)
        for _ in range(2):
            with record_routing(run.model) as record:
                run.step(*batch())
            run.evaluate(*batch())  # not counted
        num_layers = sum(name in biases for name in run.model.state_dict())
        assert len(record.calls) == num_layers and len(record) == (2 if num_layers else 0)
        found = accumulator.update()
        assert_same(found.aux_loss, expected.aux_loss)
        assert list(found.layers) == list(expected.layers)
        for name, stats in found.layers.items():
            assert stats.tokens_per_expert.equal(expected.layers[name].tokens_per_expert)
            assert_same(stats.router_entropy, expected.layers[name].router_entropy)
        for name, bias in run.model.state_dict().items():
            if name in biases:
                assert bias.equal(biases[name])
        assert not accumulator.update().aux_loss

    run_cases(check, 2, [("zbv", DEEPSEEK), (SPLIT, QUANTILE), ("1f1b", TWO_BLOCKS)])


RANDOM = config("mixtral", num_layers=3)  # two layers in one stage
RANDOM = replace(RANDOM, num_dense_layers=0, moe=replace(RANDOM.moe, router="random"))


def test_every_layer_and_micro_batch_is_routed_by_itself_and_recomputed_alike() -> None:
    """The ids of all layers, and gradients with and without a recomputation, with one seed on all ranks."""

    def check() -> tuple[int, dict[str, list[Tensor]]]:
        mesh = Mesh({"stage": 2, "expert": 2})
        gradients, records = [], []
        for recompute in ((), ("blocks",)):
            run = staged(RANDOM, mesh, "ep-tp", "1f1b", recompute=recompute)
            torch.manual_seed(1)
            with record_routing(run.model) as record:
                run.step(*(part for part in part_of_micro_batches(batch(), mesh, "ep-tp")))
            gradients.append({name: parameter.grad for name, parameter in run.model.named_parameters()})
            records.append(record.calls)
        for name, gradient in gradients[1].items():
            assert_same(gradient.full_tensor(), gradients[0][name].full_tensor(), name)
        assert all(
            ids.equal(records[1][path][call]) for path in records[0] for call, ids in enumerate(records[0][path])
        )
        return mesh.stage, records[0]

    of_ranks = run_ranks(check, 4)
    calls: dict[str, list[Tensor]] = {path: ids for _, record in of_ranks for path, ids in record.items()}
    drawn = [ids for path in sorted(calls) for ids in calls[path]]
    assert [stage for stage, _ in of_ranks] == [0, 0, 1, 1] and len(drawn) == 3 * 2
    assert not any(one.equal(other) for place, one in enumerate(drawn) for other in drawn[:place])
    for _, record in of_ranks:  # ranks along `expert` hold the same tokens
        assert all(ids.equal(calls[path][call]) for path in record for call, ids in enumerate(record[path]))
