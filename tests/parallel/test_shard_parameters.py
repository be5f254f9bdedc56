"""Parameters that become DTensors with the shardings of the rules."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from maxmoe.models import Decoder
from maxmoe.models.blocks import FeedForward
from maxmoe.parallel import parallelize, parameter_shardings, shard_parameters
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P, redistribute
from parallel.declared_modules import MESH, RULES, Inner, Outer
from support.messages import error_of
from support.parallel_decoder import CONFIG, MOE
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import fake_rank, run_ranks


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


def test_what_is_sharded_already_stays_as_it_is() -> None:
    with fake_rank(0, 8):
        mesh = Mesh(MESH.sizes)
        model = Outer()
        shard_parameters(model, mesh, RULES)
        before = dict(model.named_parameters())
        assert error_of(shard_parameters, model, mesh, RULES) == (
            f"scale is a DTensor already, on {mesh.device_mesh}: a module is parallelized once"
        )
        model.extra = Inner()
        assert "is a DTensor already" in error_of(shard_parameters, model, mesh, RULES)
        assert not isinstance(model.extra.weight, DTensor)  # type: ignore[attr-defined]
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


def test_nothing_changes_after_an_error() -> None:
    with fake_rank(0, 8):
        model = Outer(**{"first.weight": ("mlp", "mlp")})
        assert "logical name 'mlp'" in error_of(shard_parameters, model, Mesh(MESH.sizes), RULES)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


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


def test_a_planned_mesh_shards_nothing() -> None:
    message = "Mesh(fsdp=2, expert=4) is planned only: it has no process groups"
    model = Outer()
    assert error_of(shard_parameters, model, MESH, RULES) == message
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


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
    def check() -> None:
        model, rest = Outer(), nn.Linear(2, 2)
        early, other = torch.optim.AdamW(model.parameters()), torch.optim.SGD(rest.parameters())
        shard_parameters(model, Mesh({"fsdp": 2}), RULES)
        late = torch.optim.AdamW(model.parameters())
        for parameter in (*model.parameters(), *rest.parameters()):
            parameter.grad = torch.ones_like(parameter)
        before = rest.weight.clone()
        late.step()
        other.step()
        assert not rest.weight.equal(before)
        first = next(name for name, _ in model.named_parameters())
        message = f"AdamW must be made after parallelize: it holds the replaced {first}, which is no longer trained"
        with pytest.raises(RuntimeError) as caught:
            early.step()
        assert str(caught.value) == message

    run_ranks(check, 2)
