"""An input that requires a gradient on some ranks only is an error on all, where they would wait for each other."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import maxmoe
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.dispatched_layer import FAMILIES, make_batch, make_layer
from support.run_ranks import run_cases, run_ranks

FAMILY = "deepseek_v3"
CASES: list[tuple[str, dict[str, int], Dispatch]] = [
    ("ep-as-dp", {"expert": 2}, "ring_of_experts"),
    ("ep-as-dp", {"expert": 2}, "ragged_all_to_all"),
    ("ep-as-dp", {"expert": 2}, "gather_weights"),
    ("ep-tp", {"expert": 2}, "ring_of_experts"),
    ("ep-tp", {"expert": 2}, "ragged_all_to_all"),
    ("default", {"tensor": 2}, "auto"),
    ("default", {"context": 2}, "auto"),
    ("pure-fsdp", {"fsdp": 2}, "auto"),
]


def test_every_rank_names_the_input() -> None:
    """Every second layer is frozen."""
    message = "^x of MoE must require a gradient on all ranks or on none, got requires_grad=True on 1 of 2: 1$"

    def check(rules: str, sizes: dict[str, int], dispatch: Dispatch, is_frozen: bool) -> None:
        layer, mesh = make_layer(FAMILIES[FAMILY]).requires_grad_(not is_frozen), Mesh(sizes)
        whole = make_batch(FAMILIES[FAMILY], "of the router")
        parallelize(layer, mesh, rules, dispatch=dispatch)
        x = whole.x[token_sharding(mesh, rules).slices(whole.x.shape[:2])]
        with pytest.raises(ValueError, match=message):
            layer(x.requires_grad_(dist.get_rank() == 1))
        layer(x.requires_grad_()).hidden_states.sum().backward()

    run_cases(check, 2, [(*case, number % 2 == 0) for number, case in enumerate(CASES)])


class TwoInputs(nn.Module):
    """A layer whose second input is optional, a keyword, or in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = maxmoe.MoE(FAMILIES[FAMILY], dtype=torch.float64)

    def forward(self, x: Tensor, others: tuple[Tensor, ...] = (), scale: Tensor | None = None) -> Tensor:
        hidden_states: Tensor = self.moe(sum(others, x)).hidden_states
        return hidden_states if scale is None else hidden_states * scale


def test_the_input_at_fault_is_named() -> None:
    def check() -> None:
        x, flag = make_batch(FAMILIES[FAMILY], "of the router").x, dist.get_rank() == 0
        model = parallelize(TwoInputs(), Mesh({"expert": 2}), "ep-as-dp")
        with pytest.raises(ValueError, match=r"^others of TwoInputs must .* got requires_grad=True on 1 of 2: 0$"):
            model(x, (x.clone().requires_grad_(flag),))
        with pytest.raises(ValueError, match=r"^scale of TwoInputs must .* got requires_grad=True on 1 of 2: 0$"):
            model(x.requires_grad_(), scale=torch.ones((), dtype=x.dtype).requires_grad_(flag))

    run_ranks(check, 2)
