"""After an exception in a forward or backward the model is unchanged, or the error of its next call names the fix."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fuzz.fuzz_sequences import ERRORS, Operation, in_one_process, on_ranks
from maxmoe.parallel import RankError, parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import MeshRules, batch, decoder, loss
from support.run_ranks import check_at_once, run_cases, run_ranks
from support.slow_cases import by_default

EXPERT, FSDP = MeshRules("ep-as-dp", {"expert": 2}), MeshRules("pure-fsdp", {"fsdp": 2})
# Hooks of FSDP2 beside experts, of replicas, of sequences, of parts of weights and of tokens that all ranks hold.
FOUR_RANKS = [
    MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}),
    MeshRules("ep-as-dp", {"data": 2, "fsdp": 2}),
    MeshRules("cp-as-ep", {"context": 2, "expert": 2}),
    MeshRules("default", {"fsdp": 2, "tensor": 2}),
    MeshRules("ep-tp", {"data": 2, "expert": 2}),
]
CASES: list[tuple[MeshRules, dict[str, Any]]] = [
    (EXPERT, {}),
    (FSDP, {}),
    (EXPERT, {"recompute": ("blocks",)}),
    (FSDP, {"recompute": ("blocks",)}),
    (EXPERT, {"dispatch": "gather_weights"}),
    *((layout, {}) for layout in FOUR_RANKS),
]
# Where a call is interrupted: the first and the last unit, and between them in attention, router and experts.
PLACES = ("embedding", "blocks.0.attention.o_proj", "blocks.1.feed_forward.router", "blocks.1.feed_forward", "output")


def interrupted(name: str, number: int) -> list[Operation]:
    """Interruptions in turn between whole steps; every place has both errors in some case."""

    def operation(name: str, index: int = 0) -> Operation:
        return Operation(name, 0, PLACES[index], ERRORS[(number + index) % 2])

    places = range(len(PLACES) - (name == "interrupt_backward"))
    names = ("clip", "step") if name == "interrupt_forward" else ()  # gradients of a micro-batch before stay
    return [
        operation("backward"),
        *(operation(name, index) for index in places),
        *map(operation, names),
        operation("backward"),
    ]


@pytest.mark.parametrize("world_size", by_default([2, 4], [2]))
def test_an_interruption_leaves_nothing_behind(world_size: int) -> None:
    cases = []
    for number, (layout, options) in enumerate(CASES):
        for name in ("interrupt_forward", "interrupt_backward") if layout.world_size == world_size else ():
            operations = interrupted(name, number)
            cases.append((layout, options, operations, in_one_process(operations)))
    run_cases(on_ranks, world_size, cases)


def test_one_rank_that_goes_on_alone_is_an_error() -> None:
    """Collectives of its next call would be matched with other collectives of the other ranks."""

    def stop(*_arguments: object) -> None:
        raise ArithmeticError

    def train(layout: MeshRules) -> None:
        mesh = Mesh(layout.sizes, timeout=timedelta(seconds=4))
        model = parallelize(decoder(), mesh, layout.rules)
        part = token_sharding(mesh, layout.rules).slices(batch()[0].shape)
        tokens, targets = (whole[part] for whole in batch())
        loss(model(tokens), targets).backward()
        if dist.get_rank() == 1:
            handle = model.get_submodule("blocks.1.feed_forward").register_forward_hook(stop)
            with pytest.raises(ArithmeticError):
                model(tokens)
            handle.remove()
        loss(model(tokens), targets).backward()

    expected = (
        r"rank 1 was interrupted by an exception in the forward of call 2, after \d+ modules and \d+ collectives of "
        r"Decoder, and rank 0 .*End all ranks, and resume from a checkpoint"
    )

    def check(layout: MeshRules) -> None:
        with pytest.raises(RankError, match=expected):
            run_ranks(train, 2, layout)

    check_at_once(check, [(EXPERT,), (FSDP,)])
