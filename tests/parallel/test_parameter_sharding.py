"""The logical names of a model's parameters, and their shardings by rules."""

from typing import Any

import pytest
import torch
from torch import nn

from maxmoe.parallel import logical_names, parameter_shardings
from maxmoe.sharding import LogicalRules, Mesh, P
from parallel.declared_modules import MESH, RULES, Outer
from support import small_decoder
from support.messages import error_of
from support.parallel_decoder import layouts


def test_names_are_those_that_the_modules_declare() -> None:
    assert logical_names(Outer()) == {
        "first.weight": ("mlp", "embed"),
        "first.bias": ("mlp",),
        "second.weight": ("mlp", "embed"),
    }


def test_an_outer_module_comes_before_an_inner_one() -> None:
    model = Outer(**{"first.weight": ["exp", None], "scale": ()})
    assert logical_names(model)["first.weight"] == ("exp", None)
    assert logical_names(model)["second.weight"] == ("mlp", "embed")
    assert logical_names(model)["scale"] == ()
    assert logical_names(nn.ModuleList([model]))["0.first.weight"] == ("exp", None)


def test_parameters_that_this_instance_lacks_may_have_names() -> None:
    names = logical_names(Outer(**{"second.bias": ("mlp",), "extra": ("embed",), "extra.weight": ("embed",)}))
    assert "second.bias" not in names and "extra" not in names and "extra.weight" not in names


@pytest.mark.parametrize("name", ["firts.weight", "first.weights", "first.weight.data", "first"])
def test_names_of_nothing_are_refused(name: str) -> None:
    message = f"the logical_names of Outer have {name!r}, which is not among its parameters"
    assert error_of(logical_names, Outer(**{name: ("mlp", "embed")})) == message


@pytest.mark.parametrize("names", [("mlp",), ("mlp", "embed", None), "me"])
def test_names_are_one_per_dim(names: Any) -> None:
    message = f"first.weight must have one logical name per dim of its shape (8, 6), got {names!r}"
    assert error_of(logical_names, Outer(**{"first.weight": names})) == message


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"moe": None}], ids=str)
def test_every_parameter_of_a_decoder_has_names(changes: dict[str, Any]) -> None:
    model = small_decoder.make(**changes)
    assert logical_names(model).keys() == dict(model.named_parameters(remove_duplicate=False)).keys() - {
        "output.weight" if changes.get("tie_embeddings") else ""
    }
    for preset in {layout.rules for layout in layouts(2, 4, 8)}:
        for assignment in parameter_shardings(model, Mesh.planned({}), LogicalRules.load(preset), strict=True).values():
            assert assignment.names is not None and len(assignment.names) == len(assignment.shape)


def test_a_parameter_sharding_says_what_became_of_the_rules() -> None:
    found = parameter_shardings(Outer(), MESH, RULES)
    assert list(found) == ["scale", "first.weight", "first.bias", "second.weight"]
    weight = found["first.weight"]
    assert (weight.names, weight.shape, weight.dtype) == (("mlp", "embed"), (8, 6), torch.float32)
    assert weight.requested == P(None, "fsdp") == weight.sharding.spec and weight.dropped == ()
    bias = found["first.bias"]
    assert bias.requested == P(("expert", "fsdp")) == bias.sharding.spec
    assert found["scale"].names is None and found["scale"].requested == P() == found["scale"].sharding.spec


def test_axes_that_do_not_divide_are_dropped_or_refused() -> None:
    mesh = Mesh.planned({"fsdp": 4, "expert": 2})
    found = parameter_shardings(Outer(), mesh, RULES)["first.weight"]
    assert found.requested == P(None, "fsdp") and found.sharding.spec == P(None, None)
    assert [tuple(drop) for drop in found.dropped] == [("fsdp", 1, "6 is not divisible by 4")]
    model = Outer(scale=())
    assert error_of(parameter_shardings, model, mesh, RULES, strict=True) == (
        "first.weight: axis 'fsdp' of P(None, 'fsdp') cannot shard dim 1 of the shape (8, 6): 6 is not divisible by 4"
    )


def test_strict_wants_names_and_rules_for_them() -> None:
    assert error_of(parameter_shardings, Outer(), MESH, RULES, strict=True) == "scale of shape () has no logical names"
    model = Outer(**{"scale": (), "first.bias": ("mlb",)})
    message = "first.bias: no rule for the logical name 'mlb' of ('mlb',); the nearest are 'mlp'"
    assert error_of(parameter_shardings, model, MESH, RULES, strict=True) == message
    with pytest.warns(UserWarning, match="^no rule for the logical name 'mlb' of .* is not sharded$") as warnings:
        assert parameter_shardings(model, MESH, RULES)["first.bias"].sharding.spec == P(None)
    assert [warning.filename for warning in warnings] == [__file__]


def test_a_name_that_is_there_twice_is_refused_in_any_case() -> None:
    message = "first.weight: dims 0 and 1 have the same logical name 'mlp': ('mlp', 'mlp')"
    assert error_of(parameter_shardings, Outer(**{"first.weight": ("mlp", "mlp")}), MESH, RULES) == message
