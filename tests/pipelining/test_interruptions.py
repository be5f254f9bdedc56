"""After an exception in a step of a pipeline the model is unchanged, or the error of the next step names the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.models.decoder import Block
from maxmoe.parallel import clip_grad_norm_
from maxmoe.pipelining import Pipeline
from maxmoe.sharding import Mesh
from support.pairwise import pairwise
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.sampling import by_default
from support.staged_decoder import batch, config, part_of_micro_batches, staged, step_of_one_process

SMALL = config("mixtral", num_layers=2)
PLACE = "blocks.1.feed_forward.router"
NUM_BLOCKS = 1  # per stage
LARGE = 1e9  # a maximum norm above all norms


def stop_forward(error: type[BaseException]) -> Callable[..., None]:
    def stop(*_arguments: Any) -> None:
        raise error("stopped")

    return stop


def stop_backward(error: type[BaseException]) -> Callable[..., None]:
    def add_hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
        output[0].register_hook(stop_forward(error))

    return add_hook


def interrupt(run: Pipeline, hook: Callable[..., None], error: type[BaseException], parts: tuple[Tensor, ...]) -> None:
    handle = run.model.get_submodule(PLACE).register_forward_hook(hook)
    with pytest.raises(error, match="stopped"):
        run.step(*parts)
    handle.remove()


MESHES: list[tuple[str, dict[str, int]]] = [
    ("pure-fsdp", {"stage": 1, "fsdp": 2}),
    ("ep-as-dp", {"stage": 1, "expert": 2}),
]
SCHEDULES = ["gpipe", "interleaved_zero_bubble"]
CHOICES: list[list[Any]] = [MESHES, SCHEDULES, [stop_forward, stop_backward], [ArithmeticError, KeyboardInterrupt]]
CASES = [(*mesh, *others) for mesh, *others in pairwise(CHOICES)]


@pytest.mark.parametrize("cases", by_default([CASES[:4], CASES[4:]], [CASES[:4]]), ids=len)
def test_ranks_with_all_stages_go_on(cases: list[tuple[Any, ...]]) -> None:
    expected = step_of_one_process(SMALL)
    norm = torch.stack([gradient.square().sum() for gradient in expected.gradients.values()]).sum().sqrt()

    def check(rules: str, sizes: dict[str, int], schedule: str, stop: Any, error: type[BaseException]) -> None:
        mesh = Mesh(sizes)
        run = staged(SMALL, mesh, rules, schedule)
        parts = tuple(part_of_micro_batches(whole, mesh, rules) for whole in batch())
        before = dict(run.named_parameters())
        interrupt(run, stop(error), error, parts)  # before FSDP2 has run once
        run.model.zero_grad()
        run.step(*parts)
        interrupt(run, stop(error), error, parts)
        after = dict(run.named_parameters())
        changed = [name for name in before if after[name] is not before[name] or not isinstance(after[name], DTensor)]
        assert after.keys() == before.keys() and not changed
        run.model.zero_grad()
        run.step(*parts)
        assert_same(clip_grad_norm_(run.parameters(), LARGE), norm, tolerance=1e-11)
        for name, parameter in run.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name, tolerance=1e-11)

    run_cases(check, 2, cases)


def test_stages_that_have_sent_messages_say_what_to_do() -> None:
    def check() -> None:
        run = staged(SMALL, Mesh({"stage": 2}), "default", "gpipe", num_micro_batches=4)
        run.step(*batch())
        calls = []

        def stop(*_arguments: Any) -> None:
            """Raise in the first micro-batch of the last stage, while a message with the second one is sent."""
            calls.append(1)
            if len(calls) == 2 * NUM_BLOCKS + 1 - dist.get_rank() * 2 * NUM_BLOCKS:
                raise ArithmeticError

        handles = [block.register_forward_hook(stop) for block in run.model.blocks if isinstance(block, Block)]
        assert len(handles) == NUM_BLOCKS
        with pytest.raises(ArithmeticError):
            run.step(*batch())
        for handle in handles:
            handle.remove()
        for call in (run.step, run.evaluate):
            with pytest.raises(RuntimeError, match=r"interrupted the step before on rank [01], .*resume from a checkp"):
                call(*batch())

    run_ranks(check, 2)
