"""`recompute=("dispatch",)` of one layer: the gradients of a step without recomputation, for any kind of backward."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.parallel.dispatch import LocalStrategy
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.sharding import Mesh
from support.counted_collectives import CountedCollectives
from support.dispatched_layer import make_layer
from support.moved_experts import make_moves_free
from support.named import named
from support.run_ranks import run_cases, run_ranks
from support.sampling import by_default, cases_by_default

SIZES: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 6, "top_k": 2}
CONFIGS = {
    "sparse": MoEConfig(**SIZES),
    "sparse, weights on the input": MoEConfig(**SIZES, apply_weights_to="input"),
    "dense": MoEConfig(**SIZES, implementation="dense"),
    "dense, weights on the input": MoEConfig(**SIZES, implementation="dense", apply_weights_to="input"),
    "capacity": MoEConfig(**SIZES, implementation="dense", capacity_factor=1.0),
}
DISPATCHES = tuple(name for name, strategy in STRATEGIES.items() if strategy is not LocalStrategy)
FROZEN: tuple[tuple[str, ...], ...] = ((), ("experts",), ("router",), ("x",), ("experts", "x"), ("router", "x"))
NAMES = (("dispatch",), ("dispatch", "experts"))
LENGTH = 3  # length of every sequence

non_reentrant = partial(checkpoint, use_reentrant=False)


def in_a_block(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    output = layer(torch.tanh(x))
    return torch.sin(output.hidden_states), output.aux_loss


def saved_on_cpu(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return in_a_block(layer, x)


FORWARDS: dict[str, Callable[[MoE, Tensor], tuple[Tensor, Tensor]]] = {
    "no checkpoint": in_a_block,
    "non-reentrant": partial(non_reentrant, in_a_block),
    "reentrant": partial(checkpoint, in_a_block, use_reentrant=True),
    "keep_routing": partial(non_reentrant, in_a_block, context_fn=maxmoe.keep_routing),
    "nested": partial(non_reentrant, partial(non_reentrant, in_a_block)),
    "saved on the CPU": saved_on_cpu,
    "without early stop": partial(non_reentrant, in_a_block, early_stop=False),
}


def backward(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    loss.backward()
    return [leaf.grad for leaf in leaves]


def grad_of_each(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """One backward for each leaf; not all of them run through the experts."""
    return [torch.autograd.grad(loss, leaf, retain_graph=True, materialize_grads=True)[0] for leaf in leaves]


def twice(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    return backward(loss, leaves)


BACKWARDS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "backward": backward,
    "grad_of_each": grad_of_each,
    "twice": twice,
}


def gradients(layer: MoE, x: Tensor, frozen: tuple[str, ...], forward: Any, run: Any) -> list[Tensor | None]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_("x" not in frozen)
    for part in ("router", "experts"):
        layer.get_submodule(part).requires_grad_(part not in frozen)
    hidden_states, aux_loss = forward(layer, x)
    leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    gradients: list[Any] = run(hidden_states.square().sum() + aux_loss, leaves)
    return [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]


class Case(NamedTuple):
    dispatch: str
    names: tuple[str, ...]
    frozen: tuple[str, ...]
    forward: str
    run: str

    @property
    def is_possible(self) -> bool:
        # Of these checkpoints torch allows one `.backward()` only; a reentrant one needs an input with a gradient.
        is_once = self.forward in ("reentrant", "keep_routing")
        return not (is_once and self.run != "backward") and not (self.forward == "reentrant" and "x" in self.frozen)


CASES = [
    case
    for case in itertools.starmap(Case, itertools.product(DISPATCHES, NAMES, FROZEN, FORWARDS, BACKWARDS))
    if case.is_possible
]
STRIDE = 31  # between the cases of a test; prime to the numbers of values of all options


def tokens(num_sequences: int) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(num_sequences, LENGTH, SIZES["hidden_size"], generator=generator, dtype=torch.float64)


def layer(config: MoEConfig, num_chunks: int, case: Case, recompute: tuple[str, ...]) -> MoE:
    mesh, dispatch = Mesh({"expert": dist.get_world_size()}), cast(Dispatch, case.dispatch)
    return parallelize(
        make_layer(config), mesh, "ep-as-dp", dispatch=dispatch, num_chunks=num_chunks, recompute=recompute
    )


NUM_PARTS = 3  # of the cases of a configuration
# Together they have every value of every option.
BY_DEFAULT = [("sparse", (1, 0, 2), 2), ("dense, weights on the input", (0, 2), 0)]


@pytest.mark.parametrize(
    ("name", "sizes", "part"),
    cases_by_default(itertools.product(CONFIGS, [(0, 2), (1, 0, 2)], range(NUM_PARTS)), BY_DEFAULT),
    ids=str,
)
def test_the_same_bits(name: str, sizes: tuple[int, ...], part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration has other cases. Ranks without tokens take part in the same collectives."""
    make_moves_free(monkeypatch)
    config = CONFIGS[name]
    num_chunks = 1 if config.capacity_factor else len(sizes)
    turn = 2 * list(CONFIGS).index(name) + len(sizes) % 2

    def check() -> None:
        x = tokens(sizes[dist.get_rank()])
        for case in CASES[turn::STRIDE][part::NUM_PARTS]:
            if config.capacity_factor:
                case = case._replace(dispatch="ring_of_experts")
            elif config.implementation == "dense" and case.dispatch == "least_loaded":
                case = case._replace(dispatch="ragged_all_to_all")
            usual, recomputed = (layer(config, num_chunks, case, recompute) for recompute in ((), case.names))
            expected = gradients(usual, x, case.frozen, in_a_block, BACKWARDS[case.run])
            with named(case):
                got = gradients(recomputed, x, case.frozen, FORWARDS[case.forward], BACKWARDS[case.run])
            for one, other in zip(got, expected, strict=True):
                assert one is other is None or torch.equal(one, other), case

    run_ranks(check, len(sizes))


@pytest.mark.usefixtures("collectives_are_not_compared")
@pytest.mark.parametrize("turn", by_default(range(2), [0]))
def test_what_it_communicates(turn: int) -> None:
    """One more dispatch per chunk, also without tokens; none in a checkpoint, which recomputes the dispatch.

    In each turn, every second configuration has frozen experts.
    """

    def check(name: str, frozen: tuple[str, ...]) -> None:
        config = CONFIGS[name]
        x, num_chunks = tokens((2, 0)[dist.get_rank()]), 1 if config.capacity_factor else 2
        case = Case("ring_of_experts", ("dispatch",), frozen, "", "")
        modules = [layer(config, num_chunks, case, recompute) for recompute in ((), case.names)]
        for forward in ("no checkpoint", "non-reentrant", "nested"):
            counts = []
            for module in modules:
                with CountedCollectives(Mesh({"expert": 2})) as counted:
                    gradients(module, x, frozen, FORWARDS[forward], backward)
                counts.append(sum(times for times, _ in counted.counts.values()))
            assert counts[1] - counts[0] == (num_chunks if forward == "no checkpoint" else 0), (forward, counts)

    frozen = [(), ("experts",)]
    run_cases(check, 2, [(name, frozen[(number + turn) % 2]) for number, name in enumerate(CONFIGS)])
