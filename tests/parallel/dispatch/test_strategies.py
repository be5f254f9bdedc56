"""Every strategy on every kind of mesh against one process: families, loads, dtypes, ranks with few tokens and none."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.plan import dispatch_plan
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import (
    FAMILIES,
    LOADS,
    NUM_EXPERTS,
    Batch,
    Outcome,
    check_part,
    make_batch,
    make_layer,
    take_step,
)
from support.named import named
from support.pairwise import pairwise
from support.parallel_decoder import MeshRules
from support.run_ranks import run_ranks
from support.sampling import by_default

STRATEGIES = tuple(dispatch_plan.STRATEGIES)
# Strategies that send tokens to experts on fixed ranks. test_least_loaded.py tests experts that move.
SENDING = tuple(name for name in STRATEGIES if name not in ("gather_weights", "least_loaded"))
# With the number of ranks that share the experts.
LAYOUTS = [
    (MeshRules("ep-tp", {"expert": 2}), 2),
    (MeshRules("ep-as-cp", {"expert": 2}), 2),
    (MeshRules("cp-as-ep", {"context": 2}), 2),
    (MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}), 2),
    (MeshRules("ep-as-dp", {"fsdp_transpose": 2, "expert": 2}), 2),
    (MeshRules("ep-tp", {"expert": 4}), 4),
    (MeshRules("ep-tp", {"data": 2, "expert": 2}), 2),
    (MeshRules("ep-as-cp", {"fsdp": 2, "expert": 2}), 2),
    (MeshRules("ep-as-cp", {"expert": 2, "fsdp": 2}), 2),
    (MeshRules("cp-as-ep", {"context": 2, "expert": 2}), 4),
    (MeshRules("cp-as-ep", {"expert": 2, "context": 2}), 4),
    (MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}), 2),
    (MeshRules("default", {"expert": 2, "tensor": 2}), 2),
    (MeshRules("default", {"tensor": 2, "expert": 2}), 2),
    (MeshRules("default", {"context": 2, "expert": 2}), 2),
    (MeshRules("ep-tp", {"data": 2, "expert": 4}), 4),
    (MeshRules("cp-as-ep", {"context": 4, "expert": 2}), 8),
    (MeshRules("cp-as-ep", {"expert": 2, "fsdp": 2, "context": 2}), 4),
    (MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 4}), 4),
    (MeshRules("default", {"fsdp": 2, "expert": 2, "tensor": 2}), 2),
]


def spy(layer: MoE) -> list[int]:
    """Return a list that gets the number of experts of every product."""
    counts: list[int] = []
    layer.experts.register_forward_pre_hook(lambda experts, _: counts.append(experts.up_proj.shape[0]))
    return counts


def check_steps(
    layout: MeshRules,
    num_experts: int,
    config: MoEConfig,
    dispatch: Dispatch,
    cases: dict[str, tuple[Batch, Outcome]],
    *,
    num_chunks: int = 1,
    tolerance: float = 1e-12,
) -> None:
    """Take steps with one layer, and compare this rank's part of all results."""
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    layer = make_layer(config, next(iter(cases.values()))[0].x.dtype)
    shardings = parameter_shardings(layer, mesh, rules)
    parallelize(layer, mesh, rules, dispatch=dispatch, num_chunks=num_chunks)
    counts = spy(layer)
    for name, (batch, expected) in cases.items():
        part = token_sharding(mesh, rules).slices(batch.x.shape[:2])
        with named(name):
            check_part(take_step(layer, batch.part(part)), expected, part, shardings, tolerance)
            assert counts == [num_experts] * layer.runner.num_chunks, counts  # one product if no token is sent
        counts.clear()


def cases_of(config: MoEConfig, loads: tuple[str, ...] = LOADS, dtype: torch.dtype = torch.float64) -> dict:
    """Check that a mesh computes the results of one process."""
    layer = make_layer(config, dtype)
    batches = {load: make_batch(config, load, dtype=dtype) for load in loads}
    return {load: (batch, take_step(layer, batch)) for load, batch in batches.items()}


def num_local_experts(dispatch: Dispatch, num_parts: int) -> int:
    return NUM_EXPERTS if dispatch == "gather_weights" else NUM_EXPERTS // num_parts


@pytest.mark.parametrize("num_ranks", by_default([2, 4, 8], [2]))
@pytest.mark.parametrize("turn", by_default(range(2), [0]))
def test_every_strategy_family_and_load(turn: int, num_ranks: int) -> None:
    """Each turn has half of the loads for each pair of a strategy and a family: all loads for each of them."""
    layout, loads = MeshRules("ep-as-dp", {"expert": num_ranks}), (LOADS[::2], LOADS[1::2])
    choices = [
        (dispatch, family, cases_of(config, loads[(number + index + turn) % 2]))
        for number, dispatch in enumerate(SENDING)
        for index, (family, config) in enumerate(FAMILIES.items())
    ]

    def check() -> None:
        for dispatch, family, cases in choices:
            with named(dispatch, family):
                check_steps(layout, num_local_experts(dispatch, num_ranks), FAMILIES[family], dispatch, cases)

    run_ranks(check, num_ranks)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(("layout", "num_parts"), LAYOUTS, ids=str)
def test_every_mesh(layout: MeshRules, num_parts: int) -> None:
    """Other pairs of strategies, families and loads from mesh to mesh."""
    turn, families = LAYOUTS.index((layout, num_parts)), list(FAMILIES)
    steps = []
    for index, dispatch in enumerate((*SENDING * 2, "gather_weights")):
        config = FAMILIES[families[(index + turn) % len(families)]]
        load = LOADS[(index + turn // len(families)) % len(LOADS)]
        steps.append((dispatch, config, cases_of(config, (load,))))

    def check() -> None:
        for dispatch, config, cases in steps:
            with named(dispatch, config):
                check_steps(layout, num_local_experts(dispatch, num_parts), config, dispatch, cases)

    run_ranks(check, layout.world_size)


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(
    ("layout", "num_parts"),
    [LAYOUTS[2], *(pytest.param(*LAYOUTS[index], marks=pytest.mark.slow) for index in (5, 8, 11))],
    ids=str,
)
def test_chunks_padding_and_dense_products(layout: MeshRules, num_parts: int) -> None:
    """Numbers of chunks that do not divide the tokens, and more chunks than a rank has tokens."""
    variants: list[tuple[MoEConfig, int]] = [
        (FAMILIES["deepseek_v3"], 3),
        (FAMILIES["llama4"], 9),
        (FAMILIES["pools"], 1),  # documents on two ranks
        (replace(FAMILIES["gpt_oss"], implementation="dense"), 2),
    ]
    cases = [masked_cases_of(config) for config, _ in variants]

    def check() -> None:
        for dispatch in SENDING:
            for (config, num_chunks), masked in zip(variants, cases, strict=True):
                with named(dispatch, config, num_chunks):
                    num_experts = num_local_experts(dispatch, num_parts)
                    check_steps(layout, num_experts, config, dispatch, masked, num_chunks=num_chunks)

    run_ranks(check, layout.world_size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_experts_on_no_rank() -> None:
    """Ids of zero, copy and constant experts, also where the ranks are not in the order of their experts."""
    layouts = [LAYOUTS[index] for index in (5, 6, 7, 8, 9, 10, 11)]
    cases = cases_of(FAMILIES["longcat_flash"], LOADS[:2])

    def check() -> None:
        for (layout, num_parts), dispatch in itertools.product(layouts, STRATEGIES):
            with named(layout, dispatch):
                num_experts = num_local_experts(dispatch, num_parts)
                check_steps(layout, num_experts, FAMILIES["longcat_flash"], dispatch, cases)

    run_ranks(check, 4)


def masked_cases_of(config: MoEConfig) -> dict[str, tuple[Batch, Outcome]]:
    """Padding of NaN at random places, and one sequence of padding only."""
    batch = make_batch(config, "of the router", (4, 4))
    mask = torch.rand(batch.x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.7
    mask[3] = False
    batch = replace(batch, x=batch.x.masked_fill(~mask.unsqueeze(2), float("nan")), token_mask=mask)
    return {"padded": (batch, take_step(make_layer(config), batch))}


def test_capacity_of_whole_sequences() -> None:
    """Slots fill an expert in the order of the tokens of a sequence, wherever the expert is."""
    config = replace(FAMILIES["mixtral"], implementation="dense", capacity_factor=1.0)
    layouts = [LAYOUTS[3], LAYOUTS[5], LAYOUTS[6]]
    cases = cases_of(config)
    assert all(outcome.stats.dropped > 0 for load, (_, outcome) in cases.items() if load != "even")

    def check() -> None:
        for layout, num_parts in layouts:
            with named(layout):
                check_steps(layout, NUM_EXPERTS // num_parts, config, "ring_of_experts", cases)

    run_ranks(check, 4)


NUMBERS = [(4, 0, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3)]


@pytest.mark.parametrize("first", by_default(range(2), [0]))
@pytest.mark.parametrize("turn", by_default(range(len(NUMBERS) * len(SENDING)), [0]))
def test_ranks_with_other_numbers_of_sequences(turn: int, first: int) -> None:
    """Each family with other numbers and another strategy in each turn, on one of two meshes."""
    layouts = [MeshRules("ep-as-dp", {"expert": 4}), MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2})]
    cases = []
    # The sizes of pools are drawn by the numbers of the sequences, which must be the same on all ranks.
    configs = [config for family, config in FAMILIES.items() if family != "pools"]
    for index, (config, num_chunks) in enumerate(zip(configs, itertools.cycle((1, 2, 2, 1, 2, 3))), start=turn):
        sizes, dispatch = NUMBERS[index % len(NUMBERS)], SENDING[(index + turn // len(NUMBERS)) % len(SENDING)]
        layout, batch = layouts[(index // 2 + first) % 2], make_batch(config, "of the router", (sum(sizes), 3))
        cases.append((layout, config, num_chunks, sizes, dispatch, batch, take_step(make_layer(config), batch)))

    def check() -> None:
        for layout, config, num_chunks, sizes, dispatch, batch, expected in cases:
            mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
            begin = sum(sizes[: dist.get_rank()])
            part = (slice(begin, begin + sizes[dist.get_rank()]),)
            layer = make_layer(config)
            shardings = parameter_shardings(layer, mesh, rules)
            parallelize(layer, mesh, rules, dispatch=dispatch, num_chunks=num_chunks)
            counts = spy(layer)
            with named(layout, dispatch, config, sizes, num_chunks):
                check_part(take_step(layer, batch.part(part)), expected, part, shardings)
                assert counts == [NUM_EXPERTS // mesh.size("expert")] * num_chunks

    run_ranks(check, 4)


@pytest.mark.parametrize("intermediate_size", [8, 9])
def test_shared_experts_in_parts_and_whole(intermediate_size: int) -> None:
    """All ranks hold the same tokens: a shared expert of width 9 cannot be computed in two parts."""
    layout = MeshRules("ep-tp", {"expert": 2})
    config = replace(FAMILIES["deepseek_v3"], intermediate_size=intermediate_size, num_shared_experts=1)
    cases = cases_of(config, LOADS[:1])

    def check() -> None:
        for dispatch in STRATEGIES:
            with named(dispatch):
                check_steps(layout, num_local_experts(dispatch, 2), config, dispatch, cases)

    run_ranks(check, 2)


@pytest.mark.parametrize("indices", by_default([(3, 12), (5, 9)], [(3, 12)]), ids=str)
def test_bfloat16_within_its_rounding(indices: tuple[int, ...]) -> None:
    """Rows are rounded once more on their way, and sums over ranks in another order."""
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    layouts = [LAYOUTS[index] for index in indices]
    families = {family: FAMILIES[family] for family in ("deepseek_v3", "gpt_oss")}
    cases = {family: cases_of(config, LOADS[:1], torch.bfloat16) for family, config in families.items()}

    choices = pairwise([layouts, SENDING, list(families)])

    def check() -> None:
        for (layout, num_parts), dispatch, family in choices:
            with named(layout, dispatch, family):
                num_experts = num_local_experts(dispatch, num_parts)
                check_steps(layout, num_experts, families[family], dispatch, cases[family], tolerance=tolerance)

    run_ranks(check, 4)
