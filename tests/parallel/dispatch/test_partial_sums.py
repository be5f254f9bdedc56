"""The boundary of a layer in parts: which inputs and outputs are summed over the ranks, forward and backward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.nn import Routing, TopK
from maxmoe.parallel.dispatch import PartialSums
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks


def boundary_of(shared_is_partial: bool = False) -> PartialSums:
    mesh = Mesh({"data": 2, "expert": 2})
    return PartialSums(mesh, ("expert",), ("expert",), shared_is_partial=shared_is_partial)


def my_part() -> int:
    """1 on the first rank along `expert`, 10 on the second."""
    return 10 ** (dist.get_rank() % 2)


def gradient_of(inputs: Tensor, x: Tensor) -> float:
    """The gradient of (this rank's part * inputs).sum(), which is equal for all elements of x."""
    (gradient,) = torch.autograd.grad((inputs * my_part()).sum(), x, retain_graph=True)
    assert gradient.eq(gradient[0, 0]).all()
    return float(gradient[0, 0])


@pytest.mark.parametrize("shared_is_partial", [False, True])
def test_gradients_of_the_inputs(shared_is_partial: bool) -> None:
    """Every rank has the whole gradient from the router, and one summand of the gradient from the experts."""

    def check() -> list[float]:
        x = torch.ones(3, 4, requires_grad=True)
        inputs = boundary_of(shared_is_partial).enter(x)
        assert all(part.equal(x) for part in inputs)
        return [gradient_of(part, x) for part in inputs]

    for rank, (router, experts, shared) in enumerate(run_ranks(check, 4)):
        assert (router, experts) == (10.0 ** (rank % 2), 11.0)
        assert shared == (experts if shared_is_partial else router)


def test_gradients_of_the_weights_are_summed() -> None:
    def check() -> float:
        weights = torch.ones(3, 2, requires_grad=True)
        top_k = boundary_of().assign(TopK(weights, torch.zeros(3, 2, dtype=torch.int64), True))
        assert top_k.is_unpadded and top_k.experts.equal(torch.zeros(3, 2, dtype=torch.int64))
        return gradient_of(top_k.weights, weights)

    assert run_ranks(check, 4) == [11.0] * 4


@pytest.mark.parametrize("shared_is_partial", [False, True])
def test_outputs_are_summed_and_their_gradient_is_not(shared_is_partial: bool) -> None:
    """The outputs of shared experts are summed if every rank has only a part of them."""

    def check() -> tuple[float, float, list[float]]:
        boundary = boundary_of(shared_is_partial)
        routed = torch.full((3, 4), float(my_part()), requires_grad=True)
        shared = torch.full((3, 4), 100.0, requires_grad=True)
        both, alone = boundary.leave(routed, shared), boundary.leave(routed, None)
        gradients = torch.autograd.grad((both * 7).sum(), (routed, shared))
        return both[0, 0].item(), alone[0, 0].item(), [gradient[0, 0].item() for gradient in gradients]

    both = 211.0 if shared_is_partial else 111.0
    assert run_ranks(check, 4) == [(both, 11.0, [7.0, 7.0])] * 4


def test_drops_are_summed_where_ranks_have_other_experts() -> None:
    def check() -> tuple[int, int]:
        boundary = boundary_of()
        same_experts = PartialSums(boundary.mesh, ("expert",))
        dropped = torch.tensor(my_part())
        return int(boundary.all_reduce_dropped(dropped)), int(same_experts.all_reduce_dropped(dropped))

    assert run_ranks(check, 4) == [(11, 1), (11, 10), (11, 1), (11, 10)]


class Noisy(nn.Module):
    """A router whose noise is from the generator of torch, which ranks may have seeded differently."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size, dtype=torch.float64))

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        logits = x.flatten(0, 1) @ self.weight.T
        probabilities = (logits + torch.randn_like(logits)).softmax(1)
        weights, experts = probabilities.topk(self.top_k)
        return Routing.of(experts=experts, weights=weights, probabilities=probabilities, token_mask=token_mask)


@pytest.mark.parametrize("rules", [{"expert": 2}, {"tensor": 2}], ids=["experts", "parts of experts"])
def test_ranks_with_the_same_tokens_must_route_alike(rules: dict[str, int]) -> None:
    """If they do not, the backward is an error on all ranks: their parts would belong to different functions."""
    config = MoEConfig(hidden_size=6, intermediate_size=4, num_experts=8, top_k=2)

    def check() -> str:
        torch.manual_seed(0)
        layer = MoE(config, router=Noisy(config), dtype=torch.float64)
        parallelize(layer, Mesh(rules), "ep-tp" if "expert" in rules else "default")
        x = torch.randn(2, 8, 6, dtype=torch.float64)
        layer(x).hidden_states.sum().backward()
        torch.manual_seed(dist.get_rank())
        output = layer(x).hidden_states.sum()
        with pytest.raises(RuntimeError, match="must route them alike") as error:
            output.backward()
        return str(error.value)

    message = "got other experts on the ranks [1] of the group than on its rank 0: give them the same tokens and seeds"
    assert all(error.endswith(message) for error in run_ranks(check, 2))
