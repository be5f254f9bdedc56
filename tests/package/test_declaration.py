"""Declarations of modules, and invalid ones."""

from typing import get_args

import pytest
import torch
from torch import nn

from maxmoe.declaration import Declaration, FusedGate, declaration_of, gate_up_slices
from maxmoe.reference.operators import halves
from support import small_decoder
from support.moe_layers import LAYERS, make


def test_what_a_module_declares() -> None:
    module = nn.Linear(2, 2)
    assert declaration_of(module) == Declaration()
    module.declaration = {"weight": ("mlp", "embed")}
    message = r"^Linear.declaration must be a maxmoe.parallel.Declaration, got <class 'dict'>$"
    with pytest.raises(TypeError, match=message):
        declaration_of(module)
    with pytest.raises(ValueError, match=r"^tensor_parallel_dims must be positive, got 'mlp': 0$"):
        Declaration(tensor_parallel_dims={"mlp": 0})


@pytest.mark.parametrize("layout", get_args(FusedGate))
def test_gate_and_up_lie_where_the_reference_has_them(layout: FusedGate) -> None:
    """A shard of an odd size is split, too, with every element once."""
    both = torch.arange(24).view(2, 12)
    for part, expected in zip(gate_up_slices(12, layout), halves(both, layout), strict=True):
        assert both[:, part].equal(expected)
    for size in (0, 1, 5):
        gate, up = (range(size)[part] for part in gate_up_slices(size, layout))
        assert sorted([*gate, *up]) == [*range(size)] and 0 <= len(gate) - len(up) <= 1


def test_every_parameter_has_one_name_per_dim() -> None:
    for model in [small_decoder.make(), *(make(**options) for options in LAYERS.values())]:
        named = {}
        for path, module in model.named_modules():
            for name, names in declaration_of(module).logical_names.items():
                named[f"{path}.{name}" if path else name] = names
        for path, parameter in model.named_parameters():
            assert len(named[path]) == parameter.dim(), path
