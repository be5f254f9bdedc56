"""`explain` and `estimate` for pipeline stages, against the memory and messages of real ranks."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from maxmoe.models import Decoder
from maxmoe.pipelining.pipeline_plan import PipelinePlan
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.planning import Estimate, Explanation, Traffic, estimate, explain
from maxmoe.planning.communication import traffic_of
from maxmoe.planning.estimate import rank_communication
from maxmoe.planning.planned_batch import PlannedBatch
from maxmoe.sharding import Mesh
from support.counted_collectives import CountedCollectives
from support.measured_step import without_sums_of_losses
from support.run_ranks import run_ranks
from support.sampling import by_default
from support.saved_by_stages import saved_by_stages
from support.staged_decoder import BATCH, LENGTH, MOE, batch, config, part_of_micro_batches, staged

NUM_MICRO_BATCHES = 4
# All experts get all tokens, so that routing is balanced. Two and four stages get different numbers of blocks.
CONFIG = config("mixtral", num_layers=5, moe=replace(MOE["mixtral"], top_k=4, load_balance_loss_weight=0.0))
STEP: dict[str, Any] = {"batch_size": BATCH, "sequence_length": LENGTH, "num_micro_batches": NUM_MICRO_BATCHES}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class RealStep:
    """Bytes of one rank; collectives are numbers of calls and bytes by kind and axis."""

    rank: int
    names: dict[str, int]
    gradients: int
    activations: int
    collectives: dict[tuple[str, str], list[int]]
    sent: Counter[str]
    gathered: int = 0
    unsharded_gradients: int = 0


@contextmanager
def unsharded_memory(stored: dict[str, int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the bytes of the parameters that FSDP2 has gathered, and of their gradients, before and after each action.

    `stored` has the bytes of each parameter between steps.
    """
    found: list[tuple[int, int]] = []

    def counting(method: str) -> Any:
        original = getattr(PipelineStage, method)

        def run(stage: PipelineStage, *arguments: Any, **options: Any) -> Any:
            stages.add(stage)
            count()
            result = original(stage, *arguments, **options)
            count()
            return result

        return run

    @torch.no_grad()  # for to_local, which would make views for a backward
    def count() -> None:
        named = [item for one in stages for item in one.submod.named_parameters()]
        gathered = [p for name, p in named if local(p).nbytes > stored[name.removeprefix("model.")]]
        gradients = [local(p.grad).nbytes for p in gathered if p.grad is not None]
        found.append((sum(local(p).nbytes for p in gathered), sum(gradients)))

    stages: set[PipelineStage] = set()
    with pytest.MonkeyPatch.context() as patch:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            patch.setattr(PipelineStage, method, counting(method))
        yield found


@contextmanager
def sent_by_stages() -> Iterator[Counter[str]]:
    """Count the bytes of all messages to other stages, by the method that makes them."""
    sent: Counter[str] = Counter()

    def counting(method: str) -> Any:
        original = getattr(PipelineStage, method)

        def make(stage: PipelineStage, number: int) -> list[dist.P2POp]:
            operations: list[dist.P2POp] = original(stage, number)
            sent[method] += sum(operation.tensor.nbytes for operation in operations)
            return operations

        return make

    with pytest.MonkeyPatch.context() as patch:
        for method in ("get_fwd_send_ops", "get_bwd_send_ops"):
            patch.setattr(PipelineStage, method, counting(method))
        yield sent


@functools.cache
def real_steps(
    axes: tuple[tuple[str, int], ...], rules: str, schedule: str, dispatch: str, recompute: tuple[str, ...] = ()
) -> list[RealStep]:
    """Measurements of the second step, by rank."""

    def run() -> RealStep:
        mesh = Mesh(dict(axes))
        pipeline = staged(
            CONFIG, mesh, rules, schedule, num_micro_batches=NUM_MICRO_BATCHES, dispatch=dispatch, recompute=recompute
        )
        tokens, targets = (part_of_micro_batches(whole, mesh, rules, NUM_MICRO_BATCHES) for whole in batch())
        pipeline.step(tokens, targets)
        stored = dict(pipeline.named_parameters())
        sizes = {name: local(parameter).nbytes for name, parameter in stored.items()}
        for parameter in stored.values():
            parameter.grad = None
        with (
            without_sums_of_losses(),
            sent_by_stages() as sent,
            unsharded_memory(sizes) as unsharded,
            saved_by_stages(tokens, targets) as saved,
            CountedCollectives(mesh) as collectives,
        ):
            pipeline.step(tokens, targets)
        return RealStep(
            mesh.coordinates()["stage"],
            sizes,
            sum(local(parameter.grad).nbytes for parameter in stored.values() if parameter.grad is not None),
            saved.num_bytes,
            {key: count for key, count in collectives.counts.items() if "stage" not in key[1]},
            sent,
            *(max(numbers) for numbers in zip(*unsharded, strict=True)),
        )

    return run_ranks(run, Mesh.planned(dict(axes)).num_ranks)


def model(recompute: tuple[str, ...] = ()) -> Decoder:
    return Decoder(replace(CONFIG, recompute=recompute), device="meta", dtype=torch.float64)


def planned(
    axes: tuple[tuple[str, int], ...], rules: str, schedule: str, dispatch: Any, recompute: tuple[str, ...] = ()
) -> Estimate:
    mesh = Mesh.planned(dict(axes))
    return estimate(model(recompute), mesh, rules, schedule=schedule, dispatch=dispatch, **STEP)


def staged_plan(
    axes: tuple[tuple[str, int], ...], rules: str, schedule: str, dispatch: Any, recompute: tuple[str, ...] = ()
) -> PipelinePlan:
    mesh, options = Mesh.planned(dict(axes)), {"schedule": schedule, "num_micro_batches": NUM_MICRO_BATCHES}
    pipeline = explain(model(recompute), mesh, rules, dispatch=dispatch, **options).pipeline
    assert pipeline is not None
    return pipeline


def by_kind_and_axis(*flows: Traffic) -> dict[tuple[str, str], list[int]]:
    total: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for flow in flows:
        total[flow.kind, flow.axis][0] += flow.times
        total[flow.kind, flow.axis][1] += flow.bytes
    return dict(total)


STAGES = (("stage", 2),)
FSDP = (*STAGES, ("fsdp", 2))
CASES: list[tuple[Any, ...]] = [(STAGES, "default", schedule, "auto") for schedule in SCHEDULES]
CASES += [
    (((("stage", 4)),), "default", "1f1b", "auto"),
    ((*STAGES, ("expert", 2)), "default", "1f1b", "ragged_all_to_all"),
    ((*STAGES, ("expert", 2)), "ep-tp", "interleaved_1f1b", "auto"),
    (STAGES, "default", "zbv", "auto", ("blocks",)),
]
CASES_OF_FSDP: list[tuple[Any, ...]] = [(FSDP, "default", schedule, "auto") for schedule in SCHEDULES]
CASES_OF_FSDP += [(FSDP, "default", "interleaved_1f1b", "auto", ("blocks",))]
# One stage of each rank, two in a round, and two in the form of a V. Their steps run once for all tests.
BY_DEFAULT = [
    (STAGES, "default", "gpipe", "auto"),
    ((*STAGES, ("expert", 2)), "ep-tp", "interleaved_1f1b", "auto"),
    (FSDP, "default", "zbv", "auto"),
]


@pytest.mark.parametrize("case", by_default(CASES, BY_DEFAULT[:2]), ids=str)
def test_memory_and_messages_are_those_of_a_step(case: tuple[Any, ...]) -> None:
    assert_as_planned(case)


@pytest.mark.parametrize("case", by_default(CASES_OF_FSDP, BY_DEFAULT[2:]), ids=str)
def test_memory_and_collectives_of_fsdp(case: tuple[Any, ...]) -> None:
    assert_as_planned(case)
    pipeline = staged_plan(*case)
    whole = PlannedBatch(pipeline.stages[0].plan, BATCH, LENGTH, torch.float64)
    for step in real_steps(*case):
        expected = traffic_of(rank_communication(pipeline, step.rank, whole, 0))
        assert step.collectives == by_kind_and_axis(*(flow for flow in expected if flow.kind != "send"))


def assert_as_planned(case: tuple[Any, ...]) -> None:
    """Memory and messages of all ranks."""
    result = planned(*case)
    ranks = result.ranks
    for step in real_steps(*case):
        memory = ranks[step.rank].memory
        assert memory["parameters"] == sum(step.names.values())
        assert memory["gradients"] == step.gradients
        assert memory["unsharded gradients"] == step.unsharded_gradients
        # With looped_bfs, the second stage is being gathered while the first one runs, and not yet in its modules.
        if "fsdp" in dict(case[0]) and case[2] != "looped_bfs":
            assert memory["gathered parameters"] == step.gathered
        is_split = SCHEDULES[case[2]].splits_backward and case[4:] == ()
        # The first half of a split backward frees a few tensors.
        assert memory["activations"] == pytest.approx(step.activations, rel=0.02 if is_split else 0)
        assert ranks[step.rank].sent_bytes == sum(step.sent.values()) > 0
    assert sum(result.memory.values()) == max(rank.total for rank in ranks)


@pytest.mark.parametrize(
    "case", by_default([*BY_DEFAULT, (STAGES, "default", "dual_pipe_v", "auto")], BY_DEFAULT), ids=str
)
def test_stages_have_the_parameters_of_their_parts(case: tuple[Any, ...]) -> None:
    pipeline = staged_plan(*case)
    whole = dict(model().named_parameters())
    for step in real_steps(*case):
        stages = pipeline.stages_of(step.rank)
        assert {name for stage in stages for name in stage.plan.parameters} == set(step.names)
        assert sum(stage.num_parameters for stage in stages) == sum(whole[name].numel() for name in step.names)
    assert sum(stage.num_parameters for stage in pipeline.stages) == sum(map(torch.numel, whole.values()))


def uneven(num_layers: int = 6, **options: Any) -> Explanation:
    moe = replace(MOE["mixtral"], num_experts=64)
    decoder = Decoder(config("mixtral", num_layers=num_layers, num_dense_layers=0, moe=moe), device="meta")
    return explain(decoder, Mesh.planned({"stage": 3}), num_micro_batches=6, **options)


def test_the_slowest_stage_and_its_bubble() -> None:
    even, odd = uneven(blocks_per_stage=[2, 2, 2]).pipeline, uneven(blocks_per_stage=[1, 4, 1]).pipeline
    assert even is not None and odd is not None
    assert odd.slowest == 1 and even.work(1) < odd.work(1)
    assert odd.timeline.bubble > even.timeline.bubble
    assert sum(map(odd.work, range(3))) == pytest.approx(3)
    # Stage 1 has four blocks; the last stage also the output projection.
    assert odd.work(1) == pytest.approx(4 * odd.work(0))


def test_the_text_names_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = str(uneven(blocks_per_stage=[1, 4, 1], schedule="1f1b"))
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit()}
    assert "embedding, blocks.0 " in rows["0"] and "blocks.1-4" in rows["1"] and "blocks.5, norm, output" in rows["2"]
    assert [row.split()[-2] for row in rows.values()] == ["3", "2", "1"]  # in flight
    assert "Most work: stage 1," in text and "Schedule 1f1b, 6 micro-batches" in text
    costs = str(planned(STAGES, "default", "zbv", "auto"))
    assert costs.splitlines()[0].startswith("stages") and costs.splitlines()[2].startswith("0, 3 ")
    assert "hidden states to stages" in costs and "memory of rank" in costs


def test_without_stages_nothing_changes() -> None:
    for sizes in ({"expert": 2}, {"stage": 1, "expert": 2}):
        mesh, step = Mesh.planned(sizes), {"batch_size": BATCH, "sequence_length": LENGTH}
        assert str(estimate(model(), mesh, **STEP)) == str(estimate(model(), mesh, **step))
        assert str(explain(model(), mesh, num_micro_batches=NUM_MICRO_BATCHES)) == str(explain(model(), mesh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f2b"}, "schedule must be one of"),
        ({"num_micro_batches": 1}, r"num_micro_batches must be at least the number of stages \(2\)"),
        ({"stages_per_rank": 3}, "stages_per_rank must be 1 for the schedule '1f1b', got 3"),
        ({"blocks_per_stage": [5]}, "blocks_per_stage must be 2 positive numbers with the sum 5"),
        ({"schedule": "gpipe", "stages_per_rank": None, "batch_size": 7}, "batch_size"),
    ],
)
def test_errors_of_the_pipeline(options: dict[str, Any], message: str) -> None:
    mesh = Mesh.planned({"stage": 2, "fsdp": 2})
    with pytest.raises(ValueError, match=message):
        estimate(model(), mesh, **{**STEP, **options})
