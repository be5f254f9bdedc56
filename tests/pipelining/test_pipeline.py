"""Steps of a pipeline beside one process that accumulates gradients over the same micro-batches: a table of rows."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from maxmoe.models import Decoder
from maxmoe.models.decoder import Block  # type: ignore[attr-defined]
from maxmoe.pipelining import Pipeline
from maxmoe.pipelining.micro_batches import split
from maxmoe.sharding import Mesh
from pipelining.staged_models import OWN, SUBJECTS
from support.parallel_decoder import batch, decoder
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks
from support.staged_decoder import (
    DEEPSEEK,
    NUM_MICRO_BATCHES,
    SPLIT,
    TWO_BLOCKS,
    Step,
    check_gradients,
    check_output,
    check_step,
    part_of_micro_batches,
    staged,
    step_of,
    step_of_one_process,
)


@dataclass(frozen=True)
class Row:
    """A step; with several, gradients add up.

    Args:
        subject: name of the model.
        axes: mesh axes beside `stage`, with two ranks each.
        options: arguments of `maxmoe.pipeline`.
    """

    subject: str
    schedule: str
    axes: tuple[str, ...]
    num_stages: int
    rules: str
    num_steps: int
    options: dict[str, Any]

    @property
    def one_process(self) -> tuple[str, int, float]:
        """What the step of one process depends on: model, number of micro-batches, scale of the auxiliary loss."""
        return self.subject, self.options["num_micro_batches"], self.options.get("aux_loss_scale", 1.0)


def row(
    subject: str,
    schedule: str,
    *axes: str,
    num_stages: int = 2,
    rules: str = "default",
    num_steps: int = 1,
    **options: Any,
) -> Row:
    return Row(
        subject, schedule, axes, num_stages, rules, num_steps, {"num_micro_batches": NUM_MICRO_BATCHES, **options}
    )


four = functools.partial(row, num_micro_batches=4)
RING, RAGGED, GATHERED = "ring_of_experts", "ragged_all_to_all", "gather_weights"
BLOCKS, PARTS = ("blocks",), ("experts", "dispatch")  # which are recomputed
TABLE: dict[str, dict[str, Row]] = {
    "one rank has all stages": {
        "tied embeddings": row("tied embeddings", "gpipe", num_stages=1),
        "torch would run the backward of the shared norm twice": four(
            "a norm of two blocks", SPLIT, num_stages=1, stages_per_rank=2, blocks_per_stage=[2, 2]
        ),
    },
    "data-parallel ranks, all stages on each": {
        # torch once skipped this reduction (PyTorch issue 144530).
        "a split backward is summed over data": row("two blocks", SPLIT, "data", num_stages=1),
        "a split backward is summed over fsdp": row("two blocks", SPLIT, "fsdp", num_stages=1),
    },
    "models": {
        # With the last two blocks, which share the norm, on one stage.
        **{f"{name}, two stages on each rank": row(name, "zbv") for name in OWN if name != "a norm of two blocks"},
        "blocks are numbered in two rounds": row("numbers its blocks", "interleaved_1f1b"),
        "uneven stages": row("indexes its blocks", "1f1b", blocks_per_stage=[1, 3]),
        "a norm of two blocks of a stage": row("a norm of two blocks", "gpipe", blocks_per_stage=[2, 2]),
        "auxiliary losses of the layers themselves": four("classifier", "1f1b", aux_loss_scale=0.25),
        "a block is added to the hidden states": four("classifier", "gpipe", blocks_per_stage=[1, 3]),
        "transformers number their layers": row("gpt_oss of transformers", "interleaved_1f1b"),
        "adapters of quantized experts": row("adapters of nvfp4 experts", "1f1b"),
    },
    "schedules and strategies": {
        "gpipe, ring": row("mixtral", "gpipe", "expert", dispatch=RING),
        "1f1b, ragged": four("sparse blocks", "1f1b", "expert", dispatch=RAGGED, recompute=BLOCKS, aux_loss_scale=0.5),
        "looped_bfs, tensor parallel": row("gpt_oss", "looped_bfs", "expert", rules="ep-tp", recompute=PARTS),
        "interleaved_1f1b, gathered": four("mixtral", "interleaved_1f1b", "expert", dispatch=GATHERED),
    },
    "tokens and weights": {
        "adapters under fsdp": row("adapters", SPLIT, "fsdp", rules="ep-as-dp"),
        "a rank without tokens": row("padding and documents", "gpipe", "expert", dispatch=RAGGED),
        "every stage has the ids of tokens": row("routers of ids", SPLIT, "expert", dispatch=RAGGED),
    },
}
SLOW: dict[str, dict[str, Row]] = {
    "split backwards with strategies": {
        "ragged": four("gpt_oss", SPLIT, "expert", dispatch=RAGGED, recompute=PARTS, num_steps=2),
        "ring": four("deepseek_v3", "zbv", "expert", dispatch=RING),
        "tensor parallel": four("mixtral", "dual_pipe_v", "expert", rules="ep-tp", recompute=BLOCKS),
        "transformers and experts": row("mixtral of transformers", "gpipe", "expert"),
    },
    "schedules with fsdp": {
        "gpipe": four("deepseek_v3", "gpipe", "fsdp", recompute=BLOCKS),
        "1f1b": four("gpt_oss", "1f1b", "fsdp", num_steps=2),
        "looped_bfs": four("mixtral", "looped_bfs", "fsdp", recompute=BLOCKS),
        "interleaved_1f1b": four("deepseek_v3", "interleaved_1f1b", "fsdp", recompute=PARTS, num_steps=2),
        "zbv": four("mixtral", "zbv", "fsdp", recompute=PARTS),
        "dual_pipe_v": four("deepseek_v3", "dual_pipe_v", "fsdp", num_steps=2),
        "adapters and experts": row("adapters", "1f1b", "expert", rules="ep-as-dp"),
    },
    "eight ranks": {
        "chunks": row("deepseek_v3", "interleaved_1f1b", "fsdp", "expert", rules="shard-exp-on-fsdp", num_chunks=2)
    },
}
ROWS = TABLE | SLOW


def check(expected: dict[Any, Step], group: str, name: str) -> None:
    row = ROWS[group][name]
    subject = SUBJECTS[row.subject]
    mesh = Mesh({"stage": row.num_stages, **dict.fromkeys(row.axes, 2)})
    run = staged(subject.build(), mesh, row.rules, row.schedule, loss=subject.loss, **row.options)
    whole = subject.inputs, subject.targets, subject.options
    inputs, targets, options = part_of_micro_batches(whole, mesh, row.rules, row.options["num_micro_batches"])
    for _ in range(row.num_steps):
        found = run.step(inputs, targets, **options)
    check_output(run.evaluate(inputs, targets, **options), expected[row.one_process])
    check_step(found, run, expected[row.one_process], times=row.num_steps)


@pytest.mark.filterwarnings("ignore:no rule for the logical name", "ignore:the rules shard")
@pytest.mark.parametrize("group", [*TABLE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_step_equals_one_process(group: str) -> None:
    rows = ROWS[group]
    needed = {row.one_process for row in rows.values()}
    expected = {key: SUBJECTS[key[0]].step(*key[1:]) for key in needed}
    (world_size,) = {row.num_stages * 2 ** len(row.axes) for row in rows.values()}
    run_cases(functools.partial(check, expected), world_size, [(group, name) for name in rows])


def test_batches_of_different_sizes() -> None:
    """Ten rows make micro-batches of 3, 3, 2 and 2; with three rows, and one, micro-batches are empty, but run.

    torch drops the gradients of FSDP2 in the first step of a schedule, and a new shape needs a new schedule.
    """
    sizes = {10, 3, 1, 16, 8}
    steps = {size: step_of(decoder(TWO_BLOCKS), *batch(size), count=min(size, 4)) for size in sizes}

    def check(axes: dict[str, int], schedule: str, sizes: tuple[int, ...]) -> None:
        mesh, gradients = Mesh(axes), []
        run = staged(TWO_BLOCKS, mesh, "default", schedule, num_micro_batches=4)
        for size in sizes:
            found = run.step(*part_of_micro_batches(batch(size), mesh, count=4))
            assert_same(found.loss, steps[size].loss)
            assert_same(found.aux_loss, steps[size].aux_loss)
            gradients.append(steps[size].gradients)
            check_gradients(run, {name: sum(each[name] for each in gradients) for name in gradients[0]})
            run.evaluate(*batch())

    fsdp = {"stage": 1, "fsdp": 2}
    run_cases(check, 2, [({"stage": 2}, "1f1b", (3, 10, 1)), (fsdp, "1f1b", (16, 8)), (fsdp, SPLIT, (16, 8))])


def test_each_block_runs_once_for_each_micro_batch_in_the_mode_of_the_model() -> None:
    """torch's stages run the module on uninitialized memory to find shapes, unless they are given."""

    def check(schedule: str) -> None:
        run = staged(DEEPSEEK, Mesh({"stage": 2}), "default", schedule)
        blocks = [block for block in run.model.blocks if isinstance(block, Block)]
        finite, modes = [], []

        def note(module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
            finite.append(bool(output[0].isfinite().all()))
            modes.append(module.training)

        for module in (*blocks, *(stage.model for stage in run._run._stages)):
            module.register_forward_hook(note if module in blocks else lambda *call: modes.append(call[0].training))
        for call, is_training in ((run.step, True), (run.evaluate, False), (run.step, True)):
            run.model.train(is_training)
            call(*batch())
            assert len(finite) == NUM_MICRO_BATCHES * len(blocks) and all(finite)
            assert modes and set(modes) == {is_training} == {run.model.training}
            finite.clear()
            modes.clear()

    run_cases(check, 2, [("gpipe",), ("zbv",)])


def test_autocast_and_parameters_in_bfloat16() -> None:
    """Messages have the dtype of the hidden states, which under autocast is the dtype of the embedding."""
    expected = float(step_of_one_process(TWO_BLOCKS).loss)

    def check() -> None:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            run = staged(decoder(TWO_BLOCKS).to(dtype), Mesh({"stage": 2}))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                found.append(run.step(*batch()).loss.item())
            assert all(parameter.grad.dtype == dtype for parameter in run.parameters())
        assert found[0] == pytest.approx(expected, rel=0.05)
        assert found[1] == pytest.approx(found[0], rel=0.05)

    run_ranks(check, 2)


@pytest.mark.parametrize("axes", [{}, pytest.param({"fsdp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_model_without_memory_is_filled_after_it_is_cut(axes: dict[str, int]) -> None:
    expected, values = step_of_one_process(TWO_BLOCKS), decoder(TWO_BLOCKS).state_dict()

    def check() -> None:
        mesh = Mesh({"stage": 2, **axes})
        run = staged(Decoder(TWO_BLOCKS, device="meta", dtype=torch.float64), mesh)
        run.model.to_empty(device="cpu")
        here = {name: values[name] for name in run.model.state_dict()}
        set_model_state_dict(run.model, here, options=StateDictOptions(full_state_dict=True))
        check_step(run.step(*part_of_micro_batches(batch(), mesh)), run, expected)

    run_ranks(check, Mesh.planned({"stage": 2, **axes}).num_ranks)


def test_no_parameter_stays_gathered_after_an_evaluation() -> None:
    """A split backward keeps the parameters of a block gathered from its forward on."""

    def shapes(run: Pipeline) -> list[torch.Size]:
        return [parameter.to_local().shape for parameter in run.parameters() if isinstance(parameter, DTensor)]

    def check() -> None:
        mesh = Mesh({"stage": 1, "fsdp": 2})
        run = staged(TWO_BLOCKS, mesh, "pure-fsdp", "zbv")
        before = shapes(run)
        run.evaluate(*part_of_micro_batches(batch(), mesh, "pure-fsdp"))
        assert shapes(run) == before

    run_ranks(check, 2)


def test_tensors_of_another_length_than_the_inputs_are_passed_whole() -> None:
    inputs, scales = torch.arange(8), torch.ones(3)
    parts = split(inputs, {"labels": inputs + 1}, {"scales": scales, "mask": inputs > 2, "name": "a"}, 3)
    assert [len(part.inputs) for part in parts] == [3, 3, 2]
    for part in parts:
        assert part.targets["labels"].equal(part.inputs + 1) and part.options["mask"].equal(part.inputs > 2)
        assert part.options["scales"].equal(scales) and part.options["name"] == "a"
