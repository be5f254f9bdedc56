"""Clipping gradients of several meshes together, against one process; test_parallelize.py clips those of a model."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from maxmoe.parallel import clip_grad_norm_
from maxmoe.sharding import Mesh, NamedSharding, P, redistribute
from support.parts import assert_same
from support.run_ranks import run_cases

SHAPES = ((8, 3), (4, 6), (5,), (2, 2), (7,))


def plain_parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def test_norm_and_gradients_are_those_of_one_process() -> None:
    def clip(max_norm: float) -> None:
        expected = plain_parameters()
        expected_norm = torch.nn.utils.clip_grad_norm_(expected, max_norm)
        mesh = Mesh({"fsdp": 2, "expert": 2})
        parameters = plain_parameters()
        for index, spec in ((0, P(("expert", "fsdp"))), (1, P(None, "fsdp")), (2, P(None))):
            sharding = NamedSharding(mesh, P(*spec, *(None,) * (parameters[index].dim() - len(spec))))
            gradient = parameters[index].grad
            parameters[index] = nn.Parameter(redistribute(parameters[index].detach(), sharding))
            parameters[index].grad = redistribute(gradient, sharding)
        sub_mesh, gradient = mesh["expert"], parameters[3].grad
        parameters[3] = nn.Parameter(distribute_tensor(parameters[3].detach(), sub_mesh))
        parameters[3].grad = distribute_tensor(gradient, sub_mesh)
        warnings: list[logging.LogRecord] = []
        logger = logging.getLogger("torch.distributed.tensor._redistribute")
        logger.setLevel(logging.WARNING)
        logger.addFilter(lambda record: warnings.append(record) or False)
        norm = clip_grad_norm_([*parameters, nn.Parameter(torch.ones(3))], max_norm)  # the last one has no gradient
        assert not [record.getMessage() for record in warnings]
        torch.testing.assert_close(norm, expected_norm, rtol=1e-14, atol=0)
        for found, parameter in zip(parameters, expected, strict=True):
            gradient = getattr(found.grad, "full_tensor", lambda gradient=found.grad: gradient)()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-14, atol=0)

    run_cases(clip, 4, [(0.3,), (100.0,)])


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0).item() == 0.0


def test_what_parameters_may_be() -> None:
    """One tensor or an iterator; an exhausted iterator is an error: its norm would be zero on this rank alone."""
    first, second = plain_parameters()[:2]
    assert_same(clip_grad_norm_(first, 1e9), first.grad.norm())
    iterator = iter((first, second))
    assert_same(clip_grad_norm_(iterator, 1e9), torch.cat([first.grad.flatten(), second.grad.flatten()]).norm())
    with pytest.raises(ValueError, match=r"^parameters must not be empty: .* read only once"):
        clip_grad_norm_(iterator, 1e9)


def test_gradients_on_some_ranks_only_are_an_error_on_all() -> None:
    """Also for a partial gradient, whose reduction would wait for the ranks without one."""

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float64)

    def check(is_partial: bool) -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        placements = [Partial() if is_partial else Shard(0), Replicate()]
        parameters = [nn.Parameter(redistribute(ones(4), NamedSharding(mesh, P("fsdp")))) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = DTensor.from_local(ones(4 if is_partial else 2), mesh.device_mesh, placements)
        expected = ones(12).mul(2 if is_partial else 1).norm()
        assert_same(clip_grad_norm_(parameters, 1e9), expected)
        for missing in (slice(0, 1), slice(0, 3)):
            for rank in range(4):
                gradients = [parameter.grad for parameter in parameters]
                for parameter in parameters[missing] if mesh.rank == rank else ():
                    parameter.grad = None
                with pytest.raises(ValueError, match=r"^clip_grad_norm_: all ranks must have gradients of the same"):
                    clip_grad_norm_(parameters, 1e9)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
        for parameter in parameters[1:]:
            parameter.grad = None  # on all ranks
        assert_same(clip_grad_norm_(parameters, 1e9), expected / 3**0.5)

    run_cases(check, 4, [(False,), (True,)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_gradients_of_sixteen_bits(dtype: torch.dtype) -> None:
    """A norm in float16 would be infinite, and one in bfloat16 is rounded to 8 bits."""
    parameter, other = (nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (5000, 7))
    parameter.grad, other.grad = torch.full((5000,), 3000.0, dtype=dtype), torch.full((7,), 0.3, dtype=dtype)
    exact = torch.cat([parameter.grad.double(), other.grad.double()]).norm()
    found = clip_grad_norm_([parameter, other], 1.0)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0.0)
    assert 0.99 < float(parameter.grad.double().norm()) < 1.01
