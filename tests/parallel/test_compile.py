"""torch.compile of parallelized models: the numbers of eager.

Graphs break where ranks communicate, and before the call of the model, which recovers from exceptions; nowhere else.
"""

import re

import functorch.compile  # noqa: F401  torch.compile imports it at its first use: once, where ranks are forked
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.parallel import token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support.moved_experts import free_moves
from support.parallel_decoder import BLOCK, batch, decoder, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks

MOE = MoEConfig(
    hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, num_shared_experts=1, load_balance_loss_weight=0.1
)
SHAPE = (4, 6)
torch.compiler.list_backends()  # imports them


def gradients(model: nn.Module, value: Tensor) -> list[Tensor]:
    """The value, and the gradients of all parameters."""
    value.backward()
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    return [value.detach(), *found]


def graph_breaks_and_graphs() -> tuple[set[str], int]:
    """Return the functions or reasons of graph breaks since the last call, and the number of compiled graphs."""
    breaks = set()
    for reason in counters["graph_break"]:
        function = re.search(r"<function (\S+)|that the function `(\S+)`", reason)
        breaks.add((function[1] or function[2]) if function else reason)
    num_graphs = counters["stats"]["unique_graphs"]
    counters.clear()
    return breaks, num_graphs


# A warning about gathered parameters, which are not leaves. Dynamo hides it, but not from a filter that raises.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")

STRATEGIES: list[tuple[str, Dispatch]] = [
    ("ep-as-dp", "least_loaded"),
    ("ep-tp", "auto"),
    ("ep-as-dp", "ring_of_experts"),
]
# Where ranks communicate, and before the call of the model, which recovers from exceptions.
BREAKS = {
    "ep-as-dp": {"GuardedModule.__call__", "ParameterHooks.gather", "ShardedTokens._all_reduce", "ExpertRunner.run"},
    "ep-tp": {"GuardedModule.__call__", "ParameterHooks.gather", "ExpertRunner.run"}
    | {f"PartialSums.{name}" for name in ("enter", "leave", "assign", "all_reduce_dropped")},
}


@pytest.mark.parametrize(
    ("rules", "dispatch"), [STRATEGIES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in STRATEGIES[1:])]
)
def test_a_layer(rules: str, dispatch: Dispatch) -> None:
    """After the first step nothing is compiled: other tokens, and other numbers of rows that travel, change nothing."""

    def check() -> None:
        torch.manual_seed(0)
        mesh = Mesh({"expert": 2})
        layer = parallelize(MoE(MOE, dtype=torch.float64), mesh, rules, dispatch=dispatch)
        part = token_sharding(mesh, rules).slices(SHAPE)
        batches = [torch.randn(*SHAPE, 8, dtype=torch.float64)[part] for _ in range(4)]
        # On one rank: both meet in the same collectives, since graphs break where ranks communicate.
        # The partitioner of "aot_eager" would import Inductor, which takes about a second.
        compiled = torch.compile(layer, backend="aot_eager_default_partitioner") if dist.get_rank() == 0 else layer

        def step(model: nn.Module, x: Tensor) -> list[Tensor]:
            x = x.clone().requires_grad_()
            output = model(x)
            return [*gradients(layer, output.hidden_states.square().sum() + output.aux_loss), x.grad]

        graph_breaks_and_graphs()
        with free_moves():
            for number, x in enumerate(batches):
                for got, expected in zip(step(compiled, x), step(layer, x), strict=True):
                    assert_same(got, expected)
                breaks, num_graphs = graph_breaks_and_graphs()
                if compiled is not layer:
                    assert breaks == (set() if number else BREAKS[rules])
                    assert (num_graphs > 0) == (number == 0)

    run_ranks(check, 2)


def test_a_decoder() -> None:
    """Runs the graphs uncompiled, because the test above covers autograd's graphs of the layer."""

    def check() -> None:
        mesh, table = Mesh({"expert": 2}), LogicalRules.load("ep-tp")
        model = parallelize(decoder(BLOCK), mesh, table)
        tokens, targets = (part_by_definition(whole, token_spec(mesh, table), mesh) for whole in batch())
        compiled = torch.compile(model, backend="eager") if dist.get_rank() == 0 else model
        graph_breaks_and_graphs()
        for number, inputs in enumerate((tokens, tokens.flip(1), targets)):
            got = gradients(model, loss(compiled(inputs), targets))
            for actual, expected in zip(got, gradients(model, loss(model(inputs), targets)), strict=True):
                assert_same(actual, expected)
            _, num_graphs = graph_breaks_and_graphs()
            assert compiled is model or (num_graphs > 0) == (number == 0)

    run_ranks(check, 2)
