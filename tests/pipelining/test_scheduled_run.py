"""After an exception in a step of a pipeline the model is unchanged, or the error of the next step names the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.models.decoder import Block  # type: ignore[attr-defined]
from maxmoe.parallel import clip_grad_norm_
from maxmoe.pipelining import Pipeline
from maxmoe.sharding import Mesh
from support.parallel_decoder import batch
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.staged_decoder import DEEPSEEK, SPLIT, config, part_of_micro_batches, staged, step_of_one_process

SMALL = config("mixtral", num_layers=2)
PLACE = "blocks.1.feed_forward.router"
LARGE = 1e9  # a maximum norm above all norms


def fail(*_: Any) -> None:
    raise ArithmeticError("no such token") from KeyError("token")


def test_an_error_keeps_its_cause_and_leaves_nothing_behind() -> None:
    """The schedule would keep its state, and the layers their sums."""

    def check(schedule: str) -> None:
        run = staged(DEEPSEEK, Mesh({"stage": 1}), "default", schedule)
        expected = run.step(*batch())
        before = {name: parameter.grad.clone() for name, parameter in run.named_parameters()}
        norm = run.model.blocks[2].attention_norm
        for _ in range(2):
            handle = norm.register_forward_hook(fail)
            with pytest.raises(ArithmeticError, match=r"^no such token$") as error:
                run.step(*batch())
            assert isinstance(error.value.__cause__, KeyError)
            handle.remove()
            assert all(parameter.grad.equal(before[name]) for name, parameter in run.named_parameters())
        handle = norm.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
        with pytest.raises(ArithmeticError, match=r"^no such token$") as error:
            run.step(*batch())
        assert isinstance(error.value.__cause__, KeyError)
        handle.remove()
        found = run.step(*batch())
        assert found.loss.equal(expected.loss) and found.aux_loss.equal(expected.aux_loss)

    run_cases(check, 1, [("gpipe",), ("zbv",)])


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


def test_ranks_with_all_stages_go_on() -> None:
    expected = step_of_one_process(SMALL)
    norm = torch.stack([gradient.square().sum() for gradient in expected.gradients.values()]).sum().sqrt()

    def check(rules: str, axis: str, schedule: str, stop: Any, error: type[BaseException]) -> None:
        mesh = Mesh({"stage": 1, axis: 2})
        run = staged(SMALL, mesh, rules, schedule)
        parts = part_of_micro_batches(batch(), mesh, rules)
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

    cases: list[tuple[Any, ...]] = [
        ("pure-fsdp", "fsdp", "gpipe", stop_forward, ArithmeticError),
        ("pure-fsdp", "fsdp", SPLIT, stop_backward, KeyboardInterrupt),
        ("ep-as-dp", "expert", "gpipe", stop_backward, KeyboardInterrupt),
        ("ep-as-dp", "expert", SPLIT, stop_forward, ArithmeticError),
    ]
    run_cases(check, 2, cases)


def test_stages_that_have_sent_messages_say_what_to_do() -> None:
    def check() -> None:
        run = staged(SMALL, Mesh({"stage": 2}), "default", "gpipe", num_micro_batches=4)
        run.step(*batch())
        calls = []

        def stop(*_arguments: Any) -> None:
            """Raise in the first micro-batch of the last stage, while a message with the second one is sent."""
            calls.append(1)
            if len(calls) == 3 - 2 * dist.get_rank():
                raise ArithmeticError

        (block,) = (block for block in run.model.blocks if isinstance(block, Block))
        handle = block.register_forward_hook(stop)
        with pytest.raises(ArithmeticError):
            run.step(*batch())
        handle.remove()
        for call in (run.step, run.evaluate):
            with pytest.raises(RuntimeError, match=r"interrupted the step before on rank [01], .*resume from a checkp"):
                call(*batch())

    run_ranks(check, 2)
