"""shard_map: functions of the parts of tensors, values and gradients on real ranks against one process."""

import re

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe.sharding import Mesh, NamedSharding, P, redistribute, shard_map
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import run_ranks
from support.slow_cases import by_default


def feed_forward(x: Tensor, scale: float, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.silu(x @ up)
    return hidden @ down * scale, hidden


IN_SPECS = (P("data", None), None, P(None, "expert"), P("expert", None))
OUT_SPECS = (P("data", None), P("data", "expert"))


EIGHT = {"data": 2, "fsdp": 2, "expert": 2}
SIZES = [{"fsdp": 2, "expert": 2, "data": 1}, {"data": 2, "expert": 1}]


@pytest.mark.parametrize("sizes", by_default([EIGHT, *SIZES], SIZES), ids=str)
def test_shard_map_of_tokens_and_weights(sizes: dict[str, int]) -> None:
    """Data parallel, tensor parallel with a sum in the end, and an axis on which all ranks do the same."""
    inputs = {"x": whole_tensor(0), "up": whole_tensor(1, (16, 4)), "down": whole_tensor(2, (4, 16))}
    gradient = whole_tensor(3)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    expected, hidden = feed_forward(leaves["x"], 0.5, leaves["up"], leaves["down"])
    expected.backward(gradient)

    def check() -> None:
        mesh = Mesh(sizes)
        stored = P(None, "fsdp" if "fsdp" in sizes else None)  # shard_map redistributes them
        ours = {name: laid(value, mesh, stored) for name, value in inputs.items()}
        mapped = shard_map(feed_forward, mesh, IN_SPECS, OUT_SPECS, partial=("expert",))
        summands, hidden_parts = mapped(ours["x"], 0.5, ours["up"], ours["down"])
        assert_same(hidden_parts.to_local(), part_by_definition(hidden, OUT_SPECS[1], mesh), "hidden")
        output = redistribute(summands, NamedSharding(mesh, OUT_SPECS[0]))
        assert_same(output.to_local(), part_by_definition(expected, OUT_SPECS[0], mesh), "output")
        output.backward(laid(gradient, mesh, OUT_SPECS[0]).detach())
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert_same(ours[name].grad.full_tensor(), leaf.grad, name)

    run_ranks(check, Mesh.planned(sizes).num_ranks)


def test_shard_map_of_one_output() -> None:
    value = whole_tensor()

    def check() -> None:
        mesh = Mesh({"expert": 2})
        rows = P("expert", None)
        doubled = shard_map(lambda x: 2 * x, mesh, [rows], rows)(laid(value, mesh, rows))
        assert isinstance(doubled, DTensor) and doubled.full_tensor().equal(2 * value)
        total = shard_map(lambda x: x.sum(0), mesh, [rows], P(None), partial=("expert",))
        assert_same(total(laid(value, mesh, P(None, "expert"))).full_tensor(), value.sum(0))

    run_ranks(check, 2)


def test_shard_map_refuses_a_sum_taken_inside() -> None:
    mesh = Mesh.planned({"data": 2, "one": 1, "expert": 2})
    message = (
        "axis 'expert' shards input 2 (P('expert', None)) and no output: return the unreduced sum and name the axis "
        "in partial, got partial=('data',)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shard_map(feed_forward, mesh, [P("data", "one"), None, P("expert", None)], P("data", None), partial=("data",))
