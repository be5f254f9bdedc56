"""Optimizers, clipping, frozen stages and statistics of a pipeline, compared with one process."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from maxmoe import StatsAccumulator, ZeroComputation
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import clip_grad_norm_
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.sampling import by_default
from support.staged_decoder import (
    DEEPSEEK,
    MOE,
    SPLIT,
    TWO_BLOCKS,
    batch,
    check_gradients,
    config,
    decoder,
    micro_batches,
    part_of_micro_batches,
    staged,
    step_of,
)


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    return {
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "muon": lambda model: Muon(parameter_groups(model), lr=1e-2, ns_dtype=torch.float64),
    }


LATENT = replace(
    DEEPSEEK.moe, num_groups=1, top_k_groups=1, latent_size=6, zero_computation=ZeroComputation(copy=3, constant=2)
)
CONFIGS = {"deepseek_v3": TWO_BLOCKS, "latent, copy and constant experts": replace(TWO_BLOCKS, moe=LATENT)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", optimizers())
def test_training_steps_with_clipping_and_correction_biases(name: str, config: DecoderConfig) -> None:
    tokens, targets = batch()
    norms, model = [], decoder(config)
    optimizer = optimizers()[name](model)
    for _ in range(2):
        optimizer.zero_grad()
        step = step_of(model, micro_batches(tokens, targets))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        model.update_correction_bias(step.tokens_per_expert)
    assert min(norms) > 1
    expected = {key: value.detach() for key, value in model.state_dict().items()}

    def check() -> None:
        mesh = Mesh({"stage": 2, "expert": 2})
        run = staged(config, mesh, "default", "1f1b")
        optimizer = optimizers()[name](run.model)
        for norm in norms:
            optimizer.zero_grad()
            found = run.step(*(part_of_micro_batches(whole, mesh, "default") for whole in (tokens, targets)))
            assert_same(run.clip_grad_norm_(1.0), norm.detach(), "norm")
            optimizer.step()
            run.update_correction_bias(found.stats)
        for key, value in run.model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert_same(whole, expected[key], key, tolerance=1e-10)

    run_ranks(check, 4)


def test_clipping_when_a_stage_has_no_gradients_or_only_zeros() -> None:
    def check() -> None:
        mesh = Mesh({"stage": 2})
        run = staged(TWO_BLOCKS, mesh, "default", "gpipe")
        run.step(*batch())
        of_first = torch.zeros((), dtype=torch.float64)
        if mesh.rank == 0:
            of_first = torch.nn.utils.get_total_norm([parameter.grad.to_local() for parameter in run.parameters()])
        torch.distributed.all_reduce(of_first)
        for empty in (torch.zeros_like, lambda _: None):
            for parameter in run.parameters() if mesh.rank == 1 else ():
                parameter.grad = empty(parameter)
            assert_same(run.clip_grad_norm_(1e9), of_first)

    run_ranks(check, 2)


def test_clipping_with_a_stage_without_trained_parameters() -> None:
    """The function refuses parameters of a stage, as another stage may have none; the method works on every stage."""
    model = decoder(TWO_BLOCKS)
    freeze(model, 0)
    step_of(model, micro_batches(*batch()))
    expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    def check() -> None:
        model = decoder(TWO_BLOCKS)
        freeze(model, 0)
        mesh = Mesh({"stage": 2, "fsdp": 2})
        run = staged(TWO_BLOCKS, mesh, "default", "1f1b", model=model)
        run.step(*(part_of_micro_batches(whole, mesh, "default") for whole in batch()))
        trained = [parameter for parameter in run.parameters() if parameter.requires_grad]
        assert bool(trained) == (mesh.coordinates()["stage"] == 1)
        with pytest.raises(ValueError, match=r"^parameters must not belong .*: call clip_grad_norm_ of the pipeline$"):
            clip_grad_norm_(run.parameters(), 0.1)
        with pytest.raises(ValueError, match=r"^parameters must not b.* call clip_grad_norm_ of the pipeline$"):
            clip_grad_norm_(trained, 0.1)
        assert_same(run.clip_grad_norm_(0.1), expected_norm)
        check_gradients(run, expected)
        if mesh.rank == 3:
            trained[0].grad = None
        with pytest.raises(ValueError, match=r"^clip_grad_norm_: all ranks must have gradients of the same"):
            run.clip_grad_norm_(0.1)

    run_ranks(check, 4)


def freeze(model: Decoder, stage: int) -> None:
    """Freeze the first half of the blocks with the embedding, or the rest."""
    first = [f"blocks.{number}." for number in range(len(model.blocks) // 2)]
    for name, parameter in model.named_parameters():
        is_first = name.startswith(("embedding", *first))
        parameter.requires_grad_(is_first == (stage == 1))


def test_frozen_stages() -> None:
    """The first stage is frozen, so that its hidden states require no gradient; then the last one."""
    gradients = []
    for stage in range(2):
        model = decoder(DEEPSEEK)
        freeze(model, stage)
        gradients.append(step_of(model, micro_batches(*batch())).gradients)

    def check() -> None:
        for stage, schedule in ((0, "1f1b"), (1, "1f1b"), (0, SPLIT), (1, SPLIT)):
            model = decoder(DEEPSEEK)
            freeze(model, stage)
            blocks = [2, 2] if schedule == "1f1b" else None
            run = staged(DEEPSEEK, Mesh({"stage": 2}), "default", schedule, model=model, blocks_per_stage=blocks)
            run.step(*batch())
            check_gradients(run, gradients[stage])

    run_ranks(check, 2)


@pytest.mark.parametrize("schedules", by_default([("1f1b", SPLIT), ("zbv",)], [("1f1b", SPLIT)]), ids=str)
def test_balance_over_the_step(schedules: tuple[str, ...]) -> None:
    """Each micro-batch is counted once, in the order of the backwards, also where a backward runs in two parts."""
    sizes = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, load_balance_loss_weight=0.3, load_balance_scope="step"))
    model = decoder(sizes)
    StatsAccumulator(model)
    gradients = step_of(model, micro_batches(*batch(), count=4)).gradients

    def check(schedule: str) -> None:
        run = staged(sizes, Mesh({"stage": 2}), "default", schedule, num_micro_batches=4)
        StatsAccumulator(run.model)
        run.step(*batch())
        check_gradients(run, gradients)

    run_cases(check, 2, [(schedule,) for schedule in schedules])


QUANTILE = config(
    "deepseek_v3",
    moe=replace(MOE["deepseek_v3"], num_groups=1, top_k_groups=1, correction_bias_rule="quantile"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [DEEPSEEK, QUANTILE], ids=["sign", "quantile"])
@pytest.mark.parametrize("schedule", ["1f1b", SPLIT, "zbv"])
def test_stats_accumulator_has_the_layers_of_all_stages(schedule: str, sizes: DecoderConfig) -> None:
    model = decoder(sizes)
    accumulator = StatsAccumulator(model)
    for _ in range(2):
        step_of(model, micro_batches(*batch()))
    expected, biases = accumulator.update(), {k: v for k, v in model.state_dict().items() if "correction" in k}

    def check() -> None:
        run = staged(sizes, Mesh({"stage": 2}), "default", schedule)
        accumulator = StatsAccumulator(run.model)
        for _ in range(2):
            run.step(*batch())
            run.evaluate(*batch())  # not counted
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

    run_ranks(check, 2)
