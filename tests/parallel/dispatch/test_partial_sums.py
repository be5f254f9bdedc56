"""The boundary of a layer in parts: which inputs and outputs are summed over the ranks, forward and backward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.nn import TopK
from maxmoe.parallel.dispatch import PartialSums
from maxmoe.sharding import Mesh
from support.documented_routers import noisy
from support.run_ranks import run_cases, run_ranks


def gradient_of(inputs: Tensor, x: Tensor, factor: float) -> float:
    """The gradient of (factor * inputs).sum(), which is equal for all elements of x."""
    (gradient,) = torch.autograd.grad((inputs * factor).sum(), x, retain_graph=True)
    assert gradient.eq(gradient[0, 0]).all()
    return float(gradient[0, 0])


def check_boundary(shared_is_partial: bool) -> None:
    mesh = Mesh({"data": 2, "expert": 2})
    boundary = PartialSums(mesh, ("expert",), ("expert",), shared_is_partial=shared_is_partial)
    mine = (1.0, 10.0)[mesh.coordinates()["expert"]]

    # Every rank has the whole gradient from the router, and one summand of the gradient from the experts.
    x = torch.ones(3, 4, requires_grad=True)
    inputs = boundary.enter(x)
    assert all(part.equal(x) for part in inputs)
    router, experts, shared = (gradient_of(part, x, mine) for part in inputs)
    assert (router, experts, shared) == (mine, 11.0, 11.0 if shared_is_partial else mine)

    weights = torch.ones(3, 2, requires_grad=True)
    top_k = boundary.assign(TopK(weights, torch.zeros(3, 2, dtype=torch.int64), True))
    assert top_k.is_unpadded and top_k.experts.equal(torch.zeros(3, 2, dtype=torch.int64))
    assert gradient_of(top_k.weights, weights, mine) == 11.0

    # Outputs are summed and their gradient is not; of shared experts, if every rank has only a part of them.
    routed = torch.full((3, 4), mine, requires_grad=True)
    shared_outputs = torch.full((3, 4), 100.0, requires_grad=True)
    both = boundary.leave(routed, shared_outputs)
    assert both.eq(211.0 if shared_is_partial else 111.0).all() and boundary.leave(routed, None).eq(11.0).all()
    gradients = torch.autograd.grad((both * 7).sum(), (routed, shared_outputs))
    assert all(gradient.eq(7.0).all() for gradient in gradients)

    # Drops are summed where ranks have other experts.
    dropped = torch.tensor(int(mine))
    assert boundary.all_reduce_dropped(dropped) == 11
    assert PartialSums(mesh, ("expert",)).all_reduce_dropped(dropped) == mine


def test_what_is_summed() -> None:
    run_cases(check_boundary, 4, [(False,), (True,)])


def test_ranks_with_the_same_tokens_must_route_alike() -> None:
    """If they do not, the backward is an error on all ranks: their parts would belong to different functions."""
    config = MoEConfig(hidden_size=6, intermediate_size=4, num_experts=8, top_k=2)

    def check() -> list[str]:
        messages = []
        for sizes, rules in (({"expert": 2}, "ep-tp"), ({"tensor": 2}, "default")):  # experts, or parts of experts
            torch.manual_seed(0)
            layer = parallelize(MoE(config, router=noisy(config)), Mesh(sizes), rules)
            x = torch.randn(2, 8, 6)
            layer(x).hidden_states.sum().backward()
            torch.manual_seed(dist.get_rank())
            output = layer(x).hidden_states.sum()
            with pytest.raises(RuntimeError, match="must route them alike") as error:
                output.backward()
            messages.append(str(error.value))
        return messages

    message = "got other experts on the ranks [1] of the group than on its rank 0: give them the same tokens and seeds"
    for messages in run_ranks(check, 2):
        assert len(messages) == 2 and all(error.endswith(message) for error in messages)
