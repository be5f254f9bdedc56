"""The logical names of parameters, their shardings by rules, and parameters that become DTensors with them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from maxmoe.models import Decoder
from maxmoe.models.blocks import FeedForward
from maxmoe.parallel import (
    Declaration,
    logical_names,
    parallelize,
    parameter_shardings,
    reset_parameters,
    shard_parameters,
)
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P, redistribute
from support import small_decoder
from support.messages import error_of
from support.parallel_decoder import CONFIG, MOE, layouts
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import fake_rank, run_cases, run_ranks

RULES = LogicalRules([("exp", "expert"), ("embed", "fsdp"), ("mlp", ("expert", "fsdp")), ("q_heads", None)])
MESH = Mesh.planned({"fsdp": 2, "expert": 4})


class Inner(nn.Module):
    declaration = Declaration(logical_names={"weight": ("mlp", "embed"), "bias": ("mlp",)})

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
        self.declaration = Declaration(logical_names=names)


# Logical names, and shardings by rules


NOT_THERE = "the logical_names of Outer have {!r}, which is not among its parameters"
PER_DIM = "first.weight must have one logical name per dim of its shape (8, 6), got"


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


@pytest.mark.parametrize(
    ("names", "is_strict", "message"),
    [
        ({"firts.weight": ("mlp", "embed")}, False, NOT_THERE.format("firts.weight")),
        ({"first.weight.data": ("mlp", "embed")}, False, NOT_THERE.format("first.weight.data")),
        ({"first": ("mlp", "embed")}, False, NOT_THERE.format("first")),
        ({"first.weight": ("mlp",)}, False, f"{PER_DIM} ('mlp',)"),
        ({"first.weight": "me"}, False, f"{PER_DIM} 'me'"),
        (
            {"first.weight": ("mlp", "mlp")},
            False,
            "first.weight: dims 0 and 1 have the same logical name 'mlp': ('mlp', 'mlp')",
        ),
        ({}, True, "scale of shape () has no logical names"),
        (
            {"scale": (), "first.bias": ("mlb",)},
            True,
            "first.bias: no rule for the logical name 'mlb' of ('mlb',); the nearest are 'mlp'",
        ),
    ],
    ids=str,
)
def test_names_that_are_refused(names: dict[str, Any], is_strict: bool, message: str) -> None:
    assert error_of(parameter_shardings, Outer(**names), MESH, RULES, strict=is_strict) == message


def test_a_name_without_a_rule_is_a_warning() -> None:
    model = Outer(**{"first.bias": ("mlb",)})
    with pytest.warns(UserWarning, match="^no rule for the logical name 'mlb' of .* is not sharded$") as warnings:
        assert parameter_shardings(model, MESH, RULES)["first.bias"].sharding.spec == P(None)
    assert [warning.filename for warning in warnings] == [__file__]


# Parameters that become DTensors


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
        assert assignments == parameter_shardings(whole, mesh, RULES)
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
            return NotImplemented  # its operators on local tensors are dispatched here again
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


def test_nothing_changes_after_an_error() -> None:
    with fake_rank(0, 8):
        mesh, model = Mesh(MESH.sizes), Outer()
        assert error_of(shard_parameters, model, MESH, RULES) == f"{MESH} is planned only: it has no process groups"
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        shard_parameters(model, mesh, RULES)
        before = dict(model.named_parameters())
        model.extra = Inner()
        assert error_of(shard_parameters, model, mesh, RULES) == (
            f"scale is a DTensor already, on {mesh.device_mesh}: a module is parallelized once"
        )
        assert not isinstance(model.extra.weight, DTensor)  # type: ignore[attr-defined]
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


@pytest.mark.parametrize("shard", [shard_parameters, parallelize])
def test_the_first_rank_alone_warns_of_a_missing_rule(shard: Callable[..., object]) -> None:
    found = []
    for rank in (0, 1):
        with fake_rank(rank, 2), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard(Outer(**{"first.bias": ("mlb",)}), Mesh({"fsdp": 2}), RULES, allow_unused=True)
        message = "no rule for the logical name 'mlb' of "
        found.append([each.filename for each in caught if str(each.message).startswith(message)])
    assert found == [[__file__], []]


def test_dtensor_propagates_what_was_not_stated() -> None:
    """Automatic use: a module whose parameters are DTensors takes DTensors."""
    whole, x, gradient = FeedForward(16, 8).double(), whole_tensor(0), whole_tensor(1)
    leaf = x.clone().requires_grad_()
    expected = whole(leaf)
    expected.backward(gradient)
    rules = LogicalRules([("mlp", "tensor"), ("embed", "fsdp")])

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "tensor": 2})
        ours = FeedForward(16, 8).double()
        ours.load_state_dict(whole.state_dict())
        shard_parameters(ours, mesh, rules)
        tokens = laid(x, mesh, P("fsdp", None))
        output = ours(tokens)
        assert isinstance(output, DTensor)
        assert_same(output.full_tensor(), expected)
        output.backward(redistribute(gradient, NamedSharding(mesh, P("fsdp", None))))
        assert leaf.grad is not None and isinstance(tokens.grad, DTensor)
        assert_same(tokens.grad.full_tensor(), leaf.grad)
        for name, parameter in whole.named_parameters():
            assert_same(ours.get_parameter(name).grad.full_tensor(), parameter.grad, name)

    run_ranks(check, 4)


def test_an_optimizer_from_before_is_refused() -> None:
    with fake_rank(0, 2):
        model = Outer()
        early = torch.optim.AdamW(model.parameters())
        shard_parameters(model, Mesh({"fsdp": 2}), RULES)
        late = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        late.step()
        message = r"^AdamW must be made after parallelize: it holds the replaced scale, which is no longer trained$"
        with pytest.raises(RuntimeError, match=message):
            early.step()


def test_the_values_are_those_of_one_process() -> None:
    alone = Decoder(CONFIG)
    torch.manual_seed(3)
    alone.reset_parameters()
    next_number, expected = torch.rand(()), alone.state_dict()

    def draw(rules: str, sizes: dict[str, int]) -> None:
        model = parallelize(Decoder(CONFIG, device="meta"), Mesh(sizes), rules)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        reset_parameters(model)
        assert torch.rand(()) == next_number
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name]), name  # type: ignore[attr-defined]

    run_cases(draw, 4, [("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), ("ep-tp", {"data": 2, "expert": 2})])
