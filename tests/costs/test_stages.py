"""`explain` and `estimate` for pipeline stages, against the memory, messages and collectives of real ranks."""

import weakref
from collections import Counter
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

from maxmoe.costs import Estimate, Explanation, estimate, explain
from maxmoe.models import Decoder
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.pipelining.stage import Stage
from maxmoe.sharding import Mesh
from support.counted_collectives import CountedCollectives
from support.measured_step import by_kind_and_axis, without_sums_of_losses
from support.parallel_decoder import BATCH, LENGTH, batch
from support.run_ranks import run_ranks
from support.slow_cases import by_default
from support.staged_decoder import MOE, config, loss, part_of_micro_batches, staged

NUM_MICRO_BATCHES = 4
# All experts get all tokens, so that routing is balanced. Two and four stages get different numbers of blocks.
CONFIG = config("mixtral", num_layers=5, moe=replace(MOE["mixtral"], top_k=4, load_balance_loss_weight=0.0))
STEP: dict[str, Any] = {"batch_size": BATCH, "sequence_length": LENGTH, "num_micro_batches": NUM_MICRO_BATCHES}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def saved_by_stages(*batch: Tensor) -> Iterator[list[int]]:
    """Count what autograd and the engine hold at the end of each forward of a rank, without parameters, in bytes.

    `batch` are the inputs and targets of the step. Outputs wait for their gradients.
    """
    counts, held, forward = list[int](), list[weakref.ref[Tensor]](), Stage.forward
    of_batch = {tensor.untyped_storage().data_ptr() for tensor in batch}

    def memory(tensor: Tensor) -> tuple[int, int]:
        """Address and bytes. Micro-batches are views of the batch: only their own part counts."""
        storage = tensor.untyped_storage()
        is_part = storage.data_ptr() in of_batch
        return (tensor.data_ptr(), tensor.nbytes) if is_part else (storage.data_ptr(), storage.nbytes())

    def counting(stage: Stage, x: Tensor, micro_batch: Tensor) -> Tensor:
        @torch.no_grad()  # for to_local
        def pack(tensor: Tensor) -> Tensor:
            saved = tensor.detach()  # a saved output would hold the graph that holds it
            # With FSDP2, the parameters are the gathered ones here.
            parameters = (p for module in stage.modules() for p in module._parameters.values() if p is not None)
            if memory(tensor)[0] not in {memory(local(parameter))[0] for parameter in parameters}:
                held.append(weakref.ref(saved))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            output = forward(stage, x, micro_batch)
        if not stage.is_last:
            held.append(weakref.ref(output))
        alive = [tensor for reference in held if (tensor := reference()) is not None]
        counts.append(sum(dict(map(memory, alive)).values()))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "forward", counting)
        yield counts


@dataclass
class RealStep:
    """Bytes of one rank; collectives are numbers of calls and bytes by kind and axis."""

    rank: int
    names: dict[str, int]
    gradients: int
    activations: int
    collectives: dict[tuple[str, str], list[int]]
    sent: Counter[str]


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
            saved_by_stages(tokens, targets) as saved,
            CountedCollectives(mesh) as collectives,
        ):
            pipeline.step(tokens, targets)
        return RealStep(
            mesh.coordinates()["stage"],
            sizes,
            sum(local(parameter.grad).nbytes for parameter in stored.values() if parameter.grad is not None),
            max(saved),
            {key: count for key, count in collectives.counts.items() if "stage" not in key[1]},
            sent,
        )

    return run_ranks(run, Mesh.planned(dict(axes)).num_ranks)


def model(recompute: tuple[str, ...] = ()) -> Decoder:
    return Decoder(replace(CONFIG, recompute=recompute), device="meta", dtype=torch.float64)


def planned(
    axes: tuple[tuple[str, int], ...], rules: str, schedule: str, dispatch: Any, recompute: tuple[str, ...] = ()
) -> tuple[Estimate, Explanation]:
    arguments = model(recompute), Mesh.planned(dict(axes)), rules
    options: dict[str, Any] = {"schedule": schedule, "dispatch": dispatch, "num_micro_batches": NUM_MICRO_BATCHES}
    costs = estimate(
        *arguments,
        loss=lambda output: loss(output, torch.zeros(output.logits.shape[:2], dtype=torch.int64)),
        **STEP | options,
    )
    return costs, explain(*arguments, **options)


STAGES = (("stage", 2),)
FSDP = (*STAGES, ("fsdp", 2))
CASES: list[tuple[Any, ...]] = [(STAGES, "default", schedule, "auto") for schedule in SCHEDULES]
CASES += [
    (((("stage", 4)),), "default", "1f1b", "auto"),
    ((*STAGES, ("expert", 2)), "default", "1f1b", "ragged_all_to_all"),
    ((*STAGES, ("expert", 2)), "ep-tp", "interleaved_1f1b", "auto"),
    (STAGES, "default", "zbv", "auto", ("blocks",)),
]
CASES += [(FSDP, "default", schedule, "auto") for schedule in ("1f1b", "zbv")]
CASES += [(FSDP, "default", "interleaved_1f1b", "auto", ("blocks",))]
# One stage of each rank, two in a round, and two in the form of a V.
BY_DEFAULT = [
    (STAGES, "default", "gpipe", "auto"),
    ((*STAGES, ("expert", 2)), "ep-tp", "interleaved_1f1b", "auto"),
    (FSDP, "default", "zbv", "auto"),
]


@pytest.mark.parametrize("case", by_default(CASES, BY_DEFAULT), ids=str)
def test_memory_messages_and_collectives_are_those_of_a_step(case: tuple[Any, ...]) -> None:
    with without_sums_of_losses():
        result, explanation = planned(*case)
    assert explanation.pipeline is not None
    for step in real_steps(*case):
        found, stages = result.ranks[step.rank], explanation.pipeline.stages_of(step.rank)
        assert {name for stage in stages for name in stage.plan.parameters} == set(step.names)
        assert found.memory["parameters"] == sum(step.names.values())
        assert found.memory["gradients"] == step.gradients
        is_split = SCHEDULES[case[2]].splits_backward and case[4:] == ()
        # The first half of a split backward frees a few tensors.
        assert found.memory["activations"] == pytest.approx(step.activations, rel=0.02 if is_split else 0)
        assert found.sent_bytes == sum(step.sent.values()) > 0
        assert by_kind_and_axis(*(row for row in found.traffic if row.kind != "send")) == step.collectives
    assert sum(result.memory.values()) == max(rank.total for rank in result.ranks)


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
    text = str(uneven(blocks_per_stage=[1, 4, 1]))
    assert "Most work: stage 1," in text and "Schedule 1f1b, 6 micro-batches" in text


def test_without_stages_nothing_changes() -> None:
    mesh, step = Mesh.planned({"stage": 1, "expert": 2}), {"batch_size": BATCH, "sequence_length": LENGTH}
    whole = Decoder(replace(CONFIG, num_layers=1), device="meta", dtype=torch.float64)
    assert str(estimate(whole, mesh, **STEP)) == str(estimate(whole, mesh, **step))
    assert str(explain(whole, mesh, num_micro_batches=NUM_MICRO_BATCHES)) == str(explain(whole, mesh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f2b"}, "schedule must be one of"),
        ({"num_micro_batches": 1}, r"num_micro_batches must be at least the number of stages \(2\)"),
        ({"stages_per_rank": 3}, "stages_per_rank must be 1 for the schedule '1f1b', got 3"),
        ({"blocks_per_stage": [5]}, "blocks_per_stage must be 2 positive numbers with the sum 5"),
        ({"batch_size": 7}, "batch_size"),
    ],
)
def test_errors_of_the_pipeline(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(model(), Mesh.planned({"stage": 2, "fsdp": 2}), **{**STEP, **options})
