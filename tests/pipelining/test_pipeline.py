"""Inputs, results and state of a step of a pipeline, compared with one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.models.decoder import Block
from maxmoe.parallel import Declaration, PipelineParts, token_sharding
from maxmoe.pipelining import pipeline
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_ranks
from support.sampling import by_default
from support.staged_decoder import (
    DEEPSEEK,
    LENGTH,
    MOE,
    NUM_MICRO_BATCHES,
    SPLIT,
    TWO_BLOCKS,
    batch,
    check_gradients,
    check_step,
    config,
    decoder,
    micro_batches,
    part_of_micro_batches,
    staged,
    step_of,
    step_of_one_process,
)


def sums(*summands: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.stack([summand[name] for summand in summands]).sum(0) for name in summands[0]}


def test_micro_batches_of_different_sizes() -> None:
    """Ten rows make micro-batches of 3, 3, 2 and 2; with three rows, and one, micro-batches are empty, but run."""
    steps = {
        num_rows: step_of(decoder(TWO_BLOCKS), micro_batches(*batch(num_rows), count=min(num_rows, 4)))
        for num_rows in (10, 3, 1)
    }

    def check() -> None:
        run = staged(TWO_BLOCKS, Mesh({"stage": 2}), "default", "1f1b", num_micro_batches=4)
        gradients = []
        for num_rows, expected in steps.items():
            found = run.step(*batch(num_rows))
            assert_same(found.loss, expected.loss)
            assert_same(found.aux_loss, expected.aux_loss)
            gradients.append(expected.gradients)
            check_gradients(run, sums(*gradients))
            if num_rows == 3:
                run.evaluate(*batch())

    run_ranks(check, 2)


# By default each rank has all stages, for claims that do not depend on messages between stages.
each_number_of_ranks = pytest.mark.parametrize(
    ("num_ranks", "blocks"), [(1, TWO_BLOCKS), pytest.param(2, DEEPSEEK, marks=pytest.mark.slow)], ids=["1", "2"]
)


@each_number_of_ranks
def test_gradients_of_fsdp_are_kept_when_the_shape_changes(num_ranks: int, blocks: DecoderConfig) -> None:
    """torch drops the gradients of FSDP2 in the first step of a schedule, and a new shape needs a new schedule."""
    whole = batch()
    first = step_of_one_process(blocks)
    second = step_of(decoder(blocks), micro_batches(*(part[:4] for part in whole), count=2))

    def check() -> None:
        for schedule in ("1f1b", SPLIT):  # two pipelines on equal meshes
            mesh = Mesh({"stage": num_ranks, "fsdp": 2})
            run = staged(blocks, mesh, "default", schedule)
            run.step(*(part_of_micro_batches(part, mesh, "default") for part in whole))
            run.step(*(part_of_micro_batches(part[:4], mesh, "default") for part in whole))
            check_gradients(run, sums(first.gradients, second.gradients))

    run_ranks(check, 2 * num_ranks)


# Layers of all stages select by ids of tokens and of documents.
BY_IDS = config("hash", moe=(MOE["hash"], MOE["pools"], MOE["hash"]))


@pytest.mark.parametrize("schedule", by_default(["gpipe", SPLIT], [SPLIT]))
@pytest.mark.parametrize("blocks", [DEEPSEEK, BY_IDS], ids=["deepseek_v3", "by ids"])
def test_padding_documents_and_a_rank_without_tokens(blocks: DecoderConfig, schedule: str) -> None:
    tokens, targets = batch()
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[4:] = False  # the sequences of the second rank
    targets = targets.masked_fill(~mask, -100)
    documents = torch.arange(LENGTH).ge(3).long().repeat(len(tokens), 1)
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]]  # of each micro-batch, on both ranks
    expected = step_of(
        decoder(blocks),
        [(tokens[here], targets[here]) for here in rows],
        token_mask=[mask[here] for here in rows],
        document_ids=[documents[here] for here in rows],
    )

    def check() -> None:
        mesh = Mesh({"stage": 2, "expert": 2})
        run = staged(blocks, mesh, "default", schedule, dispatch="ragged_all_to_all")
        here = token_sharding(mesh).slices(tokens.shape)
        options = {"token_mask": mask[here], "document_ids": documents[here]}
        if blocks == BY_IDS:
            with pytest.raises(ValueError, match="token_ids must be given in a pipeline whose routers take ids of tok"):
                run.step(tokens[here], targets[here], **options)
            options["token_ids"] = tokens[here]
        found = run.step(tokens[here], targets[here], **options)
        check_step(found, run, expected)

    run_ranks(check, 4)


@each_number_of_ranks
def test_axes_of_data_are_summed_with_a_split_backward(num_ranks: int, blocks: DecoderConfig) -> None:
    """torch once skipped the reduction over data-parallel ranks (PyTorch issue 144530)."""
    expected = step_of_one_process(blocks)

    def check() -> None:
        mesh = Mesh({"stage": num_ranks, "data": 2})
        run = staged(blocks, mesh, "default", SPLIT)
        tokens, targets = (part_of_micro_batches(whole, mesh, "default") for whole in batch())
        check_step(run.step(tokens, targets), run, expected)

    run_ranks(check, 2 * num_ranks)


@pytest.mark.slow
def test_eight_ranks_with_fsdp_and_experts() -> None:
    expected = step_of_one_process(DEEPSEEK)

    def check() -> None:
        mesh = Mesh({"stage": 2, "fsdp": 2, "expert": 2})
        run = staged(DEEPSEEK, mesh, "shard-exp-on-fsdp", "interleaved_1f1b", num_chunks=2)
        tokens, targets = (part_of_micro_batches(whole, mesh, "shard-exp-on-fsdp") for whole in batch())
        check_step(run.step(tokens, targets), run, expected)

    run_ranks(check, 8)


def test_each_block_runs_once_for_each_micro_batch() -> None:
    """torch's stages run the module on uninitialized memory to find shapes, unless they are given."""
    calls: list[bool] = []

    def count(_block: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        calls.append(bool(output[0].isfinite().all()))

    def check() -> None:
        for schedule in ("gpipe", "zbv"):
            run = staged(DEEPSEEK, Mesh({"stage": 2}), "default", schedule)
            blocks = [block for block in run.model.blocks if isinstance(block, Block)]
            for block in blocks:
                block.register_forward_hook(count)
            run.step(*batch())
            assert len(calls) == NUM_MICRO_BATCHES * len(blocks) and all(calls)
            calls.clear()

    run_ranks(check, 2)


def test_tied_embeddings_on_one_stage() -> None:
    tied = replace(TWO_BLOCKS, tie_embeddings=True)
    expected = step_of_one_process(tied)

    def check() -> None:
        run = staged(tied, Mesh({"stage": 1}), "default", "gpipe")
        check_step(run.step(*batch()), run, expected)

    run_ranks(check, 1)


class Classifier(nn.Module):
    """A user's model: layers that return tensors, in a list inside of another module; two of them share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        moe = MoEConfig(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2, load_balance_loss_weight=0.1)
        self.encoder = nn.ModuleDict({"inputs": nn.Linear(3, 8), "layers": nn.ModuleList()})
        for _ in range(4):
            self.encoder["layers"].append(nn.Sequential(nn.LayerNorm(8), MoEFeedForward(moe)))
        self.encoder["layers"][3][0].weight = self.encoder["layers"][2][0].weight
        self.head = nn.Linear(8, 2)
        parts = PipelineParts(("encoder.inputs",), "encoder.layers", ("head",), removes_blocks=True)
        self.declaration = Declaration(pipeline_parts=parts)
        self.double()

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Tensor]:
        x = self.encoder["inputs"](x)
        for layer in self.encoder["layers"]:
            x = x + scale * layer(x)
        return {"scores": self.head(x)}


def test_a_model_of_ones_own() -> None:
    """The layers add their auxiliary loss themselves; targets are in a dict, and one option is not a tensor."""
    x, labels = torch.randn(8, 5, 3, dtype=torch.float64), torch.randint(0, 2, (8, 5))

    def classifier() -> Classifier:
        torch.manual_seed(0)
        return Classifier()

    def loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output["scores"].flatten(0, 1), targets["labels"].flatten(), reduction="sum")

    model = classifier()
    for layer in model.encoder["layers"]:
        layer[1].aux_loss_scale = 0.25
    for inputs, targets in micro_batches(x, labels, count=4):
        loss(model(inputs, scale=0.5), {"labels": targets}).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def check() -> None:
        for schedule, sizes in (("1f1b", [2, 2]), ("gpipe", [1, 3])):
            run = pipeline(
                classifier(),
                Mesh({"stage": 2}),
                loss=loss,
                schedule=schedule,
                num_micro_batches=4,
                blocks_per_stage=sizes,
                aux_loss_scale=0.25,
            )
            found = run.step(x, {"labels": labels}, scale=0.5)
            check_gradients(run, gradients)
            assert found.loss.equal(run.evaluate(x, {"labels": labels}, scale=0.5).loss)

    run_ranks(check, 2)


def test_an_evaluation_reports_the_whole_batch() -> None:
    """A layer, unlike a pipeline, communicates without gradients for its hidden states only."""
    expected = step_of_one_process(TWO_BLOCKS)

    def check() -> None:
        mesh = Mesh({"stage": 2, "data": 2})
        run = staged(TWO_BLOCKS, mesh, "default", "1f1b")
        found = run.evaluate(*(part_of_micro_batches(part, mesh, "default") for part in batch()))
        assert_same(found.loss, expected.loss)
        assert_same(found.aux_loss, expected.aux_loss)
        for stats, counts in zip(found.stats.values(), expected.tokens_per_expert, strict=True):
            assert stats.tokens_per_expert.equal(counts)

    run_ranks(check, 4)


def test_modes_reach_every_module() -> None:
    def check() -> None:
        run = staged(DEEPSEEK, Mesh({"stage": 2}), "default", "looped_bfs")
        modes: list[bool] = []
        run.model.blocks[run._run._stages[0].index].register_forward_hook(
            lambda block, _inputs, _output: modes.append(block.training)
        )
        for stage in run._run._stages:
            stage.model.register_forward_hook(lambda model, _inputs, _output: modes.append(model.training))
        run.model.eval()
        run.evaluate(*batch())
        assert modes and not any(modes) and not run.model.training
        run.model.train()
        modes.clear()
        run.step(*batch())
        assert modes and all(modes)

    run_ranks(check, 2)


def test_autocast_and_parameters_in_bfloat16() -> None:
    """Messages have the dtype of the hidden states, which under autocast is the dtype of the embedding."""
    expected = float(step_of_one_process(TWO_BLOCKS).loss)

    def check() -> None:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            model = decoder(TWO_BLOCKS).to(dtype)
            run = staged(TWO_BLOCKS, Mesh({"stage": 2}), "default", "1f1b", model=model)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                found.append(run.step(*batch()).loss.item())
            assert all(parameter.grad.dtype == dtype for parameter in run.parameters())
        assert found[0] == pytest.approx(expected, rel=0.05)
        assert found[1] == pytest.approx(found[0], rel=0.05)

    run_ranks(check, 2)


@pytest.mark.parametrize("sizes", by_default([{"stage": 2}, {"stage": 2, "fsdp": 2}], [{"stage": 2}]), ids=str)
def test_a_model_without_memory_is_filled_after_it_is_cut(sizes: dict[str, int]) -> None:
    expected = step_of_one_process(TWO_BLOCKS)
    values = decoder(TWO_BLOCKS).state_dict()

    def check() -> None:
        mesh = Mesh(sizes)
        empty = Decoder(TWO_BLOCKS, device="meta", dtype=torch.float64)
        run = staged(TWO_BLOCKS, mesh, "default", "1f1b", model=empty)
        run.model.to_empty(device="cpu")
        here = run.model.state_dict()
        set_model_state_dict(
            run.model,
            {name: values[name] for name in here},
            options=StateDictOptions(full_state_dict=True),
        )
        tokens, targets = (part_of_micro_batches(whole, mesh, "default") for whole in batch())
        check_step(run.step(tokens, targets), run, expected)

    run_ranks(check, Mesh.planned(sizes).num_ranks)
