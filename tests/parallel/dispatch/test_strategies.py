"""One table of layers on meshes, each compared with one process: outputs, losses, statistics and all gradients."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.ranks.token_group import TokenReductions
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.dispatched_layer import (
    FAMILIES,
    FORWARDS,
    LOADS,
    NUM_EXPERTS,
    SIZES,
    Batch,
    Outcome,
    check_part,
    in_a_block,
    make_batch,
    make_layer,
    take_step,
)
from support.documented import ROUTERS, noisy
from support.moved_experts import free_moves, moves_on_any_rank
from support.named import named
from support.pairwise import pairwise
from support.parallel_decoder import MeshRules
from support.run_ranks import run_cases, run_ranks

ALL_ROUTERS = {**ROUTERS, "NoisyTopK": (lambda num_experts: 2, noisy)}
CONFIGS = {
    **FAMILIES,
    "dense": replace(FAMILIES["gpt_oss"], implementation="dense"),
    "dense, weights on the input": replace(FAMILIES["llama4"], implementation="dense"),
    "capacity": replace(FAMILIES["mixtral"], implementation="dense", capacity_factor=1.0),
    "shared expert of width 9": replace(FAMILIES["deepseek_v3"], intermediate_size=9, num_shared_experts=1),
    **{
        name: MoEConfig(**SIZES, top_k=top_k(NUM_EXPERTS), load_balance_loss_weight=0.3, num_shared_experts=1)
        for name, (top_k, _) in ALL_ROUTERS.items()
    },
}


def squared_share(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    *,
    lengths: Tensor | None,
    tokens: TokenReductions,
) -> Tensor:
    """The balance loss of docs/how_to/router.md."""
    num_sequences, length, num_experts = probabilities.shape
    num_tokens = num_sequences * length if lengths is None else lengths.sum()
    (mass,) = tokens.all_reduce_sequence(probabilities.sum((0, 1)))
    mass, num_tokens = tokens.all_reduce_batch(mass, *tokens.all_reduce_sequence(num_tokens))
    return num_experts * (mass / num_tokens).square().sum()


def quadratic(gate: Tensor | None, up: Tensor) -> Tensor:
    assert gate is not None
    return gate.sigmoid() * up.square()


def grad_of_each(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """One backward for each leaf; not all of them run through the experts."""
    for leaf in leaves:
        (leaf.grad,) = torch.autograd.grad(loss, leaf, retain_graph=True, materialize_grads=True)


def twice(loss: Tensor, _leaves: Sequence[Tensor]) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


BACKWARDS: dict[str, Callable[[Tensor, Sequence[Tensor]], None]] = {
    "backward": lambda loss, _leaves: loss.backward(),
    "grad of each": grad_of_each,
    "twice": twice,
}


def make(name: str, dtype: torch.dtype = torch.float64, frozen: tuple[str, ...] = (), **changes: Any) -> MoE:
    config, parts = replace(CONFIGS[name], **changes), {}
    if name in ALL_ROUTERS:
        parts["router"] = ALL_ROUTERS[name][1](config).to(dtype)
    if name == "TopP":
        parts |= {"activation": quadratic, "balance_loss": squared_share}
    layer = make_layer(config, dtype, **parts)
    for part in {"router", "experts"} & set(frozen):
        layer.get_submodule(part).requires_grad_(False)
    return layer


class Case(NamedTuple):
    """A step on a mesh with the rules of `layout`; `num_sequences` of each rank, if the rules do not say it."""

    layout: MeshRules
    dispatch: Dispatch
    config: str
    load: str = "of the router"
    num_chunks: int = 1
    num_sequences: tuple[int, ...] = ()
    is_padded: bool = False
    dtype: torch.dtype = torch.float64
    recompute: tuple[str, ...] = ()
    forward: str = "plain"
    backward: str = "backward"
    frozen: tuple[str, ...] = ()
    factor: float | None = None  # of a buffer whose overflow is computed in chunks

    @property
    def buffer(self) -> dict[str, Any]:
        return {} if self.factor is None else {"buffer_factor": self.factor, "overflow": "chunks"}

    @property
    def is_possible(self) -> bool:
        is_dense = CONFIGS[self.config].implementation == "dense"
        needs_sequences = self.config == "ExpertChoice" and "context" in self.layout.sizes
        # Of these checkpoints torch allows one `.backward()` only; a reentrant one needs an input with a gradient.
        is_once = self.forward in ("reentrant", "keep_routing") and self.backward != "backward"
        is_without_gradient = self.forward == "reentrant" and "x" in self.frozen
        refused = (is_dense and (self.dispatch == "least_loaded" or self.factor is not None)) or needs_sequences
        return not (refused or is_once or is_without_gradient)

    @property
    def num_experts(self) -> int:
        """Number of experts of a rank."""
        axes = ("expert", "context") if self.layout.rules == "cp-as-ep" else ("expert",)
        is_whole = self.dispatch == "gather_weights"
        return NUM_EXPERTS if is_whole else NUM_EXPERTS // Mesh.planned(self.layout.sizes).size(*axes)


def cases(**options: Sequence[Any]) -> list[Case]:
    """Few cases in which every choice of an option meets every choice of each other option."""
    made = (Case(**dict(zip(options, choice, strict=True))) for choice in pairwise([*map(list, options.values())]))
    return [case for case in made if case.is_possible]


# Presets of rules, and the sizes of a mesh to use them on.
_LAYOUTS = """
    ep-as-dp,expert=2 ep-as-dp,expert=4 ep-as-dp,fsdp=2,expert=2 cp-as-ep,context=2 cp-as-ep,context=2,expert=2
    shard-exp-on-fsdp,fsdp=2,expert=2 ep-tp,expert=4 ep-tp,data=2,expert=2 default,expert=2,tensor=2
    ep-as-dp,fsdp_transpose=2,expert=2

    ep-tp,expert=2 ep-as-cp,expert=2 ep-as-cp,fsdp=2,expert=2 ep-as-cp,expert=2,fsdp=2 cp-as-ep,expert=2,context=2
    default,tensor=2,expert=2 default,context=2,expert=2 ep-tp,data=2,expert=4 cp-as-ep,context=4,expert=2
    cp-as-ep,expert=2,fsdp=2,context=2 shard-exp-on-fsdp,fsdp=2,expert=4 default,fsdp=2,expert=2,tensor=2
"""
# With TRANSPOSED, hooks of the experts gather, not FSDP2.
(EXPERT, EXPERT_4, BOTH, CONTEXT, CONTEXT_EXPERT, ON_FSDP, SAME_TOKENS, DATA, TENSOR, TRANSPOSED, *OTHER_MESHES) = map(
    MeshRules.of, _LAYOUTS.split()
)
MESHES = [CONTEXT, BOTH, TRANSPOSED, SAME_TOKENS, DATA, CONTEXT_EXPERT, ON_FSDP, TENSOR, *OTHER_MESHES]
# Other families and loads from mesh to mesh and from strategy to strategy.
ON_MESHES = [
    Case(*choice, config, load)
    for choice, config, load in zip(
        itertools.product(MESHES, STRATEGIES), itertools.cycle(FAMILIES), itertools.cycle(LOADS), strict=False
    )
]
NAMES = (("dispatch",), ("dispatch", "experts"))
SIZES_OF_BUFFERS: list[list[Any]] = [
    [*STRATEGIES],
    [1.0, 1.25, 4.0],
    [
        *((load, ()) for load in ("even", "all to one expert", "three quarters to one expert")),
        ("of the router", (4, 0, 2, 1)),
    ],
]

MOVES = cases(
    layout=[BOTH, TRANSPOSED, CONTEXT_EXPERT, ON_FSDP],
    dispatch=["least_loaded"],
    config=["deepseek_v3", "gpt_oss"],
    load=["three quarters to one expert"],
    num_chunks=[1, 3],
    is_padded=[True],
    recompute=[(), ("dispatch", "experts")],
    forward=["plain", "keep_routing"],
)
# Ranks with other rows and the same parameters: all compute the same number of windows. "dispatch recomputed" has
# buffers in every kind of checkpoint.
BUFFERS = cases(
    layout=[BOTH, TRANSPOSED, CONTEXT_EXPERT, ON_FSDP, TENSOR, DATA],
    dispatch=STRATEGIES,
    config=["gpt_oss", "llama4", "longcat_flash", "muse_spark"],
    load=["of the router", "three quarters to one expert"],
    factor=[0.5],
    num_chunks=[1, 2],
    is_padded=[False, True],
    recompute=[(), *NAMES],
    forward=["plain", "nested", "saved on the CPU"],
    frozen=[(), ("experts",), ("router",), ("x",)],
)

TABLE: dict[str, list[Case]] = {
    "every family, load and strategy": cases(
        layout=[EXPERT, EXPERT_4, MeshRules.of("ep-as-dp,expert=8")],
        dispatch=STRATEGIES,
        config=FAMILIES,
        load=LOADS,
    ),
    "every mesh": ON_MESHES[:: len(STRATEGIES) + 1],
    "every mesh with every strategy": [case for index, case in enumerate(ON_MESHES) if index % (len(STRATEGIES) + 1)],
    # Numbers of chunks that do not divide the tokens, and more chunks than a rank has tokens; documents on two ranks.
    "chunks, padding and dense products": cases(
        layout=[CONTEXT, SAME_TOKENS, MeshRules.of("ep-as-cp,expert=2,fsdp=2"), ON_FSDP],
        dispatch=STRATEGIES,
        config=["deepseek_v3", "llama4", "pools", "dense"],
        num_chunks=[1, 3, 9],
        is_padded=[True],
    ),
    # Slots fill an expert in the order of the tokens of a sequence, wherever the expert is.
    "capacity of whole sequences": cases(
        layout=[BOTH, SAME_TOKENS, DATA],
        dispatch=["ring_of_experts"],
        config=["capacity"],
        load=["of the router", "a quarter to one expert", "three quarters to one expert"],
    ),
    "other numbers of sequences on each rank": cases(
        layout=[EXPERT_4, BOTH],
        dispatch=STRATEGIES,
        config=["deepseek_v3", "longcat_flash", "hash"],
        num_chunks=[1, 2],
        num_sequences=[(4, 0, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3)],
    ),
    # Latents, and shared experts of a width that the ranks can share or cannot.
    "ranks with the same tokens": cases(
        layout=[MeshRules.of("ep-tp,expert=2")],
        dispatch=["ring_of_experts", "gather_weights"],
        config=["deepseek_v3", "shared expert of width 9", "muse_spark", "nemotron_h"],
    ),
    "routers, activations and losses of users": cases(
        layout=[EXPERT, CONTEXT_EXPERT, TENSOR, DATA], dispatch=STRATEGIES, config=ALL_ROUTERS
    ),
    "dispatch recomputed in any checkpoint and by any backward": cases(
        layout=[EXPERT],
        dispatch=[name for name in STRATEGIES if name != "gather_weights"],
        config=["mixtral", "llama4", "dense", "dense, weights on the input"],
        num_chunks=[1, 2],
        num_sequences=[(1, 2), (0, 2)],
        recompute=NAMES,
        forward=FORWARDS,
        backward=BACKWARDS,
        frozen=[(), ("experts",), ("router",), ("x",), ("experts", "x"), ("router", "x")],
        factor=[None, 0.5],
    ),
    "experts that move in any checkpoint and on any mesh": [MOVES[row] for row in (1, 3, 5, 6)],  # one for each mesh
    "experts that move in every checkpoint on every mesh": MOVES,
    # One rank has all rows of a load, or none.
    "buffers of any size": [
        *(
            Case(EXPERT_4, dispatch, "mixtral", load, num_sequences=sequences, factor=factor)
            for dispatch, factor, (load, sequences) in pairwise(SIZES_OF_BUFFERS)
        ),
        Case(EXPERT_4, "ring_of_experts", "mixtral", factor=0.25),  # the second rank has the most windows
    ],
    "buffers on any mesh": BUFFERS[::3],
    "buffers with every strategy on every mesh": BUFFERS,
    # Rows are rounded once more on their way, and sums over ranks in another order.
    "bfloat16 within its rounding": cases(
        layout=[BOTH, TENSOR], dispatch=STRATEGIES, config=["deepseek_v3", "gpt_oss"], dtype=[torch.bfloat16]
    ),
}
SLOW = {
    ("every family, load and strategy", 4),
    ("every family, load and strategy", 8),
    ("every mesh", 8),
    ("every mesh with every strategy", 2),
    ("every mesh with every strategy", 4),
    ("every mesh with every strategy", 8),
    ("chunks, padding and dense products", 4),
    ("experts that move in every checkpoint on every mesh", 4),
    ("buffers with every strategy on every mesh", 4),
}
STARTS = sorted({(claim, case.layout.world_size) for claim, cases in TABLE.items() for case in cases})


@functools.cache
def one_process(
    config: str,
    load: str,
    shape: tuple[int, int],
    is_padded: bool,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
    run: str,
) -> tuple[Batch, Outcome]:
    """A batch and the results of one process; padding is NaN at random places, and one sequence of padding only."""
    batch = make_batch(CONFIGS[config], load, shape, dtype)
    if is_padded:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
        mask[3] = False
        batch = replace(batch, x=batch.x.masked_fill(~mask.unsqueeze(2), float("nan")), token_mask=mask)
        if batch.experts is not None:
            batch = replace(batch, experts=batch.experts.masked_fill(~mask.unsqueeze(2), -1))
    layer = make(config, dtype, frozen)
    forward = in_a_block(FORWARDS["plain"], layer)
    outcome = take_step(layer, batch, forward, BACKWARDS[run], trains_input="x" not in frozen)
    assert outcome.stats.dropped > 0 or config != "capacity" or load == "even"
    return batch, outcome


def expected_of(case: Case) -> tuple[Batch, Outcome]:
    shape = (4, 4) if case.is_padded else (sum(case.num_sequences), 3) if case.num_sequences else (8, 8)
    return one_process(case.config, case.load, shape, case.is_padded, case.dtype, case.frozen, case.backward)


def part_of(case: Case, mesh: Mesh, rules: LogicalRules, batch: Batch) -> tuple[slice, ...]:
    if not case.num_sequences:
        return token_sharding(mesh, rules).slices(batch.x.shape[:2])
    rank = dist.get_rank()
    begin = sum(case.num_sequences[:rank])
    return (slice(begin, begin + case.num_sequences[rank]),)


def check(case: Case, batch: Batch, expected: Outcome) -> None:
    """Compare this rank's part of all results, twice, since foreign weights are freed and refilled."""
    mesh, rules = Mesh(case.layout.sizes), LogicalRules.load(case.layout.rules)
    layer = make(case.config, case.dtype, case.frozen, **case.buffer)
    shardings = parameter_shardings(layer, mesh, rules)
    options: dict[str, Any] = {"num_chunks": case.num_chunks, "recompute": case.recompute}
    parallelize(layer, mesh, rules, dispatch=case.dispatch, **options)
    counts: list[int] = []
    layer.experts.register_forward_pre_hook(lambda experts, _: counts.append(experts.up_proj.shape[0]))
    part = part_of(case, mesh, rules, batch)
    tolerance = 4 * torch.finfo(torch.bfloat16).eps if case.dtype == torch.bfloat16 else 1e-12
    forward, differentiate = in_a_block(FORWARDS[case.forward], layer), BACKWARDS[case.backward]
    for _ in range(2 if case.dispatch == "least_loaded" else 1):
        counts.clear()
        with free_moves(), moves_on_any_rank() as moves:
            got = take_step(layer, batch.part(part), forward, differentiate, trains_input="x" not in case.frozen)
        check_part(got, expected, part, shardings, tolerance)
        assert set(counts) == {case.num_experts}, counts
        if case.factor is not None and case.factor < 1.0:
            assert len(counts) > layer.runner.num_chunks  # several windows
        if not case.recompute and case.forward == "plain" and case.factor is None:
            assert len(counts) == layer.runner.num_chunks  # one product if no token is sent
        if case.load == "three quarters to one expert" and case.dispatch == "least_loaded":
            assert moves() == (case.layout.rules != "ep-tp")  # where all ranks hold the same tokens, none is sent


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.filterwarnings("ignore:the rules shard sequences over .* declare nothing")
@pytest.mark.parametrize(
    ("claim", "world_size"),
    [pytest.param(*start, marks=pytest.mark.slow if start in SLOW else []) for start in STARTS],
)
def test_equals_one_process(claim: str, world_size: int) -> None:
    chosen = [(case, *expected_of(case)) for case in TABLE[claim] if case.layout.world_size == world_size]

    def check_all() -> None:
        for case, batch, expected in chosen:
            with named(case):
                check(case, batch, expected)

    run_ranks(check_all, world_size, deadline=300.0)


def test_recomputation_dispatches_each_chunk_once_more() -> None:
    """Also without tokens; in a checkpoint it adds nothing, which recomputes the dispatch already."""

    def check(name: str, frozen: tuple[str, ...]) -> None:
        batch = make_batch(CONFIGS[name], "of the router", (2, 3))
        part, num_chunks = batch.part((slice(2 * dist.get_rank(), 2),)), 1 if name == "capacity" else 2
        options: dict[str, Any] = {"dispatch": "ring_of_experts", "num_chunks": num_chunks}
        for kind in ("plain", "non-reentrant", "nested"):
            counts = []
            for recompute in ((), ("dispatch",)):
                layer = parallelize(
                    make(name, frozen=frozen), Mesh({"expert": 2}), "ep-as-dp", **options, recompute=recompute
                )
                with CountedCollectives(Mesh({"expert": 2})) as counted:
                    take_step(layer, part, in_a_block(FORWARDS[kind], layer))
                counts.append(sum(times for times, _ in counted.counts.values()))
            assert counts[1] - counts[0] == (num_chunks if kind == "plain" else 0), (kind, counts)

    run_cases(check, 2, [("mixtral", ()), ("llama4", ("experts",)), ("dense", ("experts",)), ("capacity", ())])
