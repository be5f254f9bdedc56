"""The logical names of a model's parameters, the places they give, and parameters that become DTensors there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from maxmoe.models import Decoder
from maxmoe.sharding import LogicalRules, Mesh, P, assign, logical_names, shard_parameters
from support import small_decoder
from support.parallel_decoder import CONFIG, MOE, layouts
from support.parts import part_by_definition
from support.run_ranks import fake_rank, run_ranks

RULES = LogicalRules([("exp", "expert"), ("embed", "fsdp"), ("mlp", ("expert", "fsdp")), ("heads", None)])
MESH = Mesh.planned({"fsdp": 2, "expert": 4})


class Inner(nn.Module):
    logical_names = {"weight": ("mlp", "embed"), "bias": ("mlp",)}  # noqa: RUF012

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.register_parameter("bias", nn.Parameter(torch.randn(8)) if bias else None)


class Outer(nn.Module):
    def __init__(self, **names: Any) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner(bias=False)
        self.extra = None
        self.scale = nn.Parameter(torch.randn(()))
        self.logical_names = names


def error_of(call, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is what is tested
        call(*arguments, **options)
    return str(caught.value)


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
    message = f"Outer.logical_names has {name!r}, which is no parameter of it"
    assert error_of(logical_names, Outer(**{name: ("mlp", "embed")})) == message


@pytest.mark.parametrize("names", [("mlp",), ("mlp", "embed", None), "me"])
def test_names_are_one_per_dim(names: Any) -> None:
    message = f"first.weight has the shape (8, 6) and the logical names {names!r}"
    assert error_of(logical_names, Outer(**{"first.weight": names})) == message


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"moe": None}], ids=str)
def test_every_parameter_of_a_decoder_has_names(changes: dict[str, Any]) -> None:
    model = small_decoder.make(**changes)
    assert logical_names(model).keys() == dict(model.named_parameters(remove_duplicate=False)).keys() - {
        "output.weight" if changes.get("tie_embeddings") else ""
    }
    for preset in {layout.rules for layout in layouts(2, 4, 8)}:
        for assignment in assign(model, Mesh.planned({}), LogicalRules.load(preset), strict=True).values():
            assert assignment.names is not None and len(assignment.names) == len(assignment.shape)


def test_an_assignment_says_what_became_of_the_rules() -> None:
    found = assign(Outer(), MESH, RULES)
    assert list(found) == ["scale", "first.weight", "first.bias", "second.weight"]
    weight = found["first.weight"]
    assert (weight.names, weight.shape, weight.dtype) == (("mlp", "embed"), (8, 6), torch.float32)
    assert weight.wanted == P(None, "fsdp") == weight.sharding.spec and weight.dropped == ()
    bias = found["first.bias"]
    assert bias.wanted == P(("expert", "fsdp")) == bias.sharding.spec
    assert found["scale"].names is None and found["scale"].wanted == P() == found["scale"].sharding.spec


def test_axes_that_do_not_divide_are_dropped_or_refused() -> None:
    mesh = Mesh.planned({"fsdp": 4, "expert": 2})
    found = assign(Outer(), mesh, RULES)["first.weight"]
    assert found.wanted == P(None, "fsdp") and found.sharding.spec == P(None, None)
    assert [tuple(drop) for drop in found.dropped] == [("fsdp", 1, "6 is not divisible by 4")]
    model = Outer(scale=())
    assert error_of(assign, model, mesh, RULES, strict=True) == (
        "first.weight: axis 'fsdp' of P(None, 'fsdp') cannot shard dim 1 of the shape (8, 6): 6 is not divisible by 4"
    )


def test_strict_wants_names_and_rules_for_them() -> None:
    assert error_of(assign, Outer(), MESH, RULES, strict=True) == "scale of shape () has no logical names"
    model = Outer(**{"scale": (), "first.bias": ("mlb",)})
    message = "first.bias: no rule for the logical name 'mlb' of ('mlb',); the nearest are 'mlp'"
    assert error_of(assign, model, MESH, RULES, strict=True) == message
    with pytest.warns(UserWarning, match="no rule for the logical name 'mlb'"):
        assert assign(model, MESH, RULES)["first.bias"].sharding.spec == P(None)


def test_a_name_that_is_there_twice_is_refused_in_any_case() -> None:
    message = "first.weight: logical name 'mlp' is that of dim 0 and of dim 1: ('mlp', 'mlp')"
    assert error_of(assign, Outer(**{"first.weight": ("mlp", "mlp")}), MESH, RULES) == message


def shared() -> Outer:
    model = Outer()
    model.second.weight = model.first.weight
    model.second.weight.requires_grad_(False)
    return model


def test_values_of_the_first_rank_on_every_rank() -> None:
    whole = shared()

    def check() -> None:
        model, mesh = shared(), Mesh({"fsdp": 2, "expert": 2})
        model.load_state_dict(whole.state_dict())
        if mesh.rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(mesh.rank)
        assignments = shard_parameters(model, mesh, RULES)
        assert assignments == assign(whole, mesh, RULES)
        assert [name for name, _ in model.named_parameters()] == list(assignments)
        assert model.second.weight is model.first.weight and not model.first.weight.requires_grad
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name)
            assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
            assert parameter.requires_grad == expected.requires_grad and parameter.is_leaf
            assert parameter.stride() == expected.stride() and parameter.device_mesh == mesh.device_mesh
            part = part_by_definition(expected, assignments[name].sharding.spec, mesh)
            assert parameter.to_local().equal(part) and parameter.full_tensor().equal(expected), name
            assert parameter.to_local().is_contiguous()
            assert parameter.to_local().untyped_storage().nbytes() == part.numel() * part.itemsize, "of the part only"

    run_ranks(check, 4)


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest tensor that an operator made on the CPU."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it does with its parts comes here again
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def test_from_meta_no_rank_ever_holds_a_whole_parameter() -> None:
    rules = LogicalRules.load("shard-exp-on-fsdp")

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        model = Decoder(CONFIG, device="meta", dtype=torch.float64)
        with LargestAllocation() as largest:
            assignments = shard_parameters(model, mesh, rules)
            assert largest.elements == 0 and all(parameter.is_meta for parameter in model.parameters())
            model.to_empty(device="cpu")
            shard_sizes = {a.sharding.bytes(a.shape, torch.int8) for a in assignments.values()}
            assert largest.elements == max(shard_sizes) < MOE.num_experts * MOE.hidden_size * MOE.intermediate_size
        for name, assignment in assignments.items():
            parameter = model.get_parameter(name)
            assert isinstance(parameter, DTensor) and parameter.placements == assignment.sharding.placements
            assert parameter.to_local().shape == assignment.sharding.shard_shape(assignment.shape), name

    run_ranks(check, 4)


def test_what_is_sharded_already_stays_as_it_is() -> None:
    with fake_rank(0, 8):
        mesh = Mesh(MESH.sizes)
        model = Outer()
        shard_parameters(model, mesh, RULES)
        before = dict(model.named_parameters())
        assert error_of(shard_parameters, model, mesh, RULES) == f"scale is a DTensor already, on {mesh.device_mesh}"
        model.extra = Inner()
        assert "is a DTensor already" in error_of(shard_parameters, model, mesh, RULES)
        assert not isinstance(model.extra.weight, DTensor)
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


def test_nothing_changes_after_an_error() -> None:
    with fake_rank(0, 8):
        model = Outer(**{"first.weight": ("mlp", "mlp")})
        assert "logical name 'mlp'" in error_of(shard_parameters, model, Mesh(MESH.sizes), RULES)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_planned_mesh_shards_nothing() -> None:
    message = "Mesh(fsdp=2, expert=4) is planned only: it has no process groups"
    model = Outer()
    assert error_of(shard_parameters, model, MESH, RULES) == message
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
