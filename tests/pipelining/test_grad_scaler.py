"""A scaler in a pipeline, against one process that accumulates over the same micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe import set_aux_loss_scale
from maxmoe.parallel import GradScaler
from maxmoe.pipelining import pipeline
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.staged_decoder import NUM_MICRO_BATCHES, batch, config, decoder, loss, micro_batches, part_of_micro_batches

CONFIG = config("mixtral", num_layers=2)
FROZEN = ("embedding", "blocks.0.")  # the first of two stages, without experts


def model_of(is_frozen: bool) -> Any:
    model = decoder(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (is_frozen and name.startswith(FROZEN)))
    return model


def trained(
    model: nn.Module, scaler: Any, backward: Callable[[], object], ranks: list[int | None]
) -> tuple[list[Any], dict[str, Tensor]]:
    """One step for each of `ranks`, the rank whose gradients are infinite in the step; -1 is every rank."""
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


def in_one_process(is_frozen: bool, num_steps: int) -> tuple[list[Any], dict[str, Tensor]]:
    model, scaler = model_of(is_frozen), torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward() -> None:
        for tokens, targets in micro_batches(*batch()):
            output = model(tokens)
            scaler.scale(loss(output, targets) + output.aux_loss).backward()

    return trained(model, scaler, backward, [None, *[-1] * (num_steps - 2), None])


def check_pipeline(expected: dict[bool, Any], sizes: dict[str, int], is_frozen: bool) -> None:
    """Compare with the scales and weights of one process, which are in `expected` by `is_frozen`."""
    mesh, scaler = Mesh(sizes), GradScaler("cpu", init_scale=64.0)
    run = pipeline(
        model_of(is_frozen),
        mesh,
        "ep-as-dp",
        loss=lambda output, targets: scaler.scale(loss(output, targets)),
        schedule="1f1b",
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    tokens, targets = (part_of_micro_batches(tensor, mesh.within_stage(), "ep-as-dp") for tensor in batch())
    losses = []

    def backward() -> None:
        set_aux_loss_scale(run.model, scaler.get_scale())
        losses.append(run.step(tokens, targets).loss / scaler.get_scale())

    ranks = range(mesh.num_ranks)[mesh.num_ranks // 2 if is_frozen else 0 :]
    scales, weights = trained(run.model, scaler, backward, [None, *ranks, None])
    expected_scales, expected_weights = expected[is_frozen]
    assert scales == expected_scales
    assert losses[1] == losses[-1] < losses[0]
    for name, weight in weights.items():
        assert_same(weight.full_tensor() if isinstance(weight, DTensor) else weight, expected_weights[name].data, name)


def test_stages_skip_the_same_steps() -> None:
    """The gradients are NaN on each rank in turn; a frozen stage has none, and takes part."""
    expected = {False: in_one_process(False, 4), True: in_one_process(True, 3)}
    run_cases(partial(check_pipeline, expected), 2, [({"stage": 2}, False), ({"stage": 2}, True)])


def test_stages_on_several_ranks_skip_the_same_steps() -> None:
    expected = {False: in_one_process(False, 6)}
    run_cases(partial(check_pipeline, expected), 4, [({"stage": 2, "expert": 2}, False)])


def test_torch_scaler_raises() -> None:
    """torch's scaler is refused even if the gradients of a stage have one placement: other stages may overflow."""

    def check() -> None:
        options: dict[str, Any] = {"schedule": "gpipe", "num_micro_batches": NUM_MICRO_BATCHES}
        run, scaler = pipeline(decoder(CONFIG), Mesh({"stage": 2}), loss=loss, **options), torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        run.step(*batch())
        with pytest.raises(RuntimeError, match=r"use maxmoe\.parallel\.GradScaler$"):
            scaler.step(torch.optim.SGD(run.parameters()))

    run_ranks(check, 2)
