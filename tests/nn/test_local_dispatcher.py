"""The dispatcher of each implementation, and the rows that it makes; test_moe.py has what drops slots."""

from maxmoe.nn.local_dispatcher import (
    CapacityDispatcher,
    DenseDispatcher,
    LocalCounts,
    LocalDispatcher,
    local_dispatcher,
)
from support.moe_layers import COMPUTE, assert_meets_specification, make, tokens


def test_an_implementation_has_one_dispatcher() -> None:
    kinds = {name: type(local_dispatcher(make(**options).config)) for name, options in COMPUTE.items()}
    assert kinds == {
        "sparse": LocalDispatcher,
        "buffer": LocalDispatcher,
        "windows": LocalDispatcher,
        "dense": DenseDispatcher,
        "capacity": CapacityDispatcher,
        "wide_capacity": CapacityDispatcher,
    }


def test_capacity_beyond_the_slots_of_a_sequence_costs_nothing() -> None:
    """A sequence of one token has two slots: the buffer has two rows per expert, not the capacity of 64."""
    layer = make(implementation="dense", num_experts=64, top_k=2, capacity_factor=64.0)
    x = tokens(layer, 3, 1)
    top_k = layer.router(x.flatten(0, 1)).top_k
    dispatched = layer.runner.dispatcher.dispatch(x.flatten(0, 1), top_k, LocalCounts(3))()
    assert dispatched.x.shape[0] == 64 * 3 * 2 and dispatched.dropped == 0
    assert_meets_specification(layer, x)
