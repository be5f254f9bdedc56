"""Two threads that call a model on a mesh at the same time both get an error."""

from collections.abc import Callable
from typing import Any

import pytest

from maxmoe import pipeline
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import CONFIG, MeshRules, batch, decoder, loss, step_of_one_process, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases, run_ranks
from support.threads import in_threads

MESSAGE = "^models on a mesh must be called by one thread at a time, got calls of two"
LAYOUTS = [MeshRules("pure-fsdp", {"fsdp": 2}), MeshRules("ep-as-dp", {"expert": 2})]


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=MESSAGE):
        call()


def training(layout: MeshRules) -> Any:
    """A parallelized model, and a function that computes its gradients as one process does."""
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    model = parallelize(decoder(), mesh, rules)
    tokens, targets = (part_by_definition(whole, token_spec(mesh, rules), mesh) for whole in batch())
    expected = step_of_one_process(CONFIG)[1]

    def step() -> None:
        loss(model(tokens), targets).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), expected.values(), strict=True):
            assert_same(parameter.grad.full_tensor(), wanted, name)
        model.zero_grad()

    return model, step


def once(call: Callable[[], object]) -> Callable[..., None]:
    """A hook that calls a function the first time."""
    calls = [call]
    return lambda *_: calls.pop()() if calls else None


OTHERS: dict[str, Callable[[Any], object]] = {
    "forward": lambda model: model(batch()[0][:1]),
    "generation": lambda model: model.generate(batch()[0][:1], 2),
}


def test_calls_of_two_threads() -> None:
    """One call begins during the forward or the backward of the other. Afterwards one thread can continue."""

    def check(other: str, layout: MeshRules) -> None:
        model, step = training(layout)

        def call_of_another() -> None:
            refused(lambda: in_threads(lambda: OTHERS[other](model)))

        hook = model.blocks[1].register_forward_hook(once(call_of_another))
        refused(step)
        hook.remove()
        step()
        hook = model.blocks[0].register_full_backward_hook(once(call_of_another))
        refused(step)
        hook.remove()
        model.zero_grad()
        in_threads(step)
        step()

    run_cases(check, 2, zip(OTHERS, LAYOUTS, strict=True))


def test_a_pipeline() -> None:
    def check() -> None:
        model = decoder()
        stages = pipeline(model, Mesh({"stage": 1}), loss=loss, num_micro_batches=2, schedule="gpipe")
        tokens, targets = batch()

        def evaluate() -> object:
            return stages.evaluate(tokens, targets)

        hook = model.blocks[0].register_forward_hook(once(lambda: refused(lambda: in_threads(evaluate))))
        refused(evaluate)
        hook.remove()
        evaluate()

    run_ranks(check, 1)
