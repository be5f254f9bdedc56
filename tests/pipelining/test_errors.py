"""Bad input is an error on every rank before anything is sent; a rank that fails in a stage is named by all others."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from maxmoe import StatsAccumulator
from maxmoe.models import Decoder
from maxmoe.parallel import Declaration, PipelineParts, parallelize
from maxmoe.pipelining import pipeline
from maxmoe.sharding import Mesh
from pipelining.staged_models import BY_IDS, Scaled, X, squares
from ranks.failing_ranks import FAILURES, TIMEOUT, check_rank_2_is_named, outcomes, patience_with
from support.messages import error_of
from support.parallel_decoder import batch, decoder
from support.run_ranks import run_ranks
from support.staged_decoder import config, loss, staged

MIXTRAL = config("mixtral")
SMALL = config("mixtral", num_layers=2)


def make(model: nn.Module | None = None, stages: int = 2, **options: Any) -> Any:
    options = {"loss": loss, "schedule": "gpipe", "num_micro_batches": 4, **options}
    return pipeline(decoder(MIXTRAL) if model is None else model, Mesh({"stage": stages}), **options)


class Undeclared(nn.Module):
    def __init__(self, parts: PipelineParts | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        if parts is not None:
            self.declaration = Declaration(pipeline_parts=parts)


def shared_blocks() -> Decoder:
    model = decoder(MIXTRAL)
    model.blocks[3].attention.q_proj.weight = model.blocks[0].attention.q_proj.weight
    return model


def accumulating() -> Decoder:
    model = decoder(MIXTRAL)
    StatsAccumulator(model)
    return model


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "more stages than blocks": (
        lambda: make(schedule="looped_bfs", stages_per_rank=3),
        "the model must have a block for each of the 6 stages, got 4 blocks",
    ),
    "no declaration": (
        lambda: make(Undeclared()),
        "Undeclared must declare its pipeline_parts, see maxmoe.parallel.Declaration",
    ),
    "unknown part": (
        lambda: make(Undeclared(PipelineParts((), "blocks", ("head",)))),
        "the pipeline_parts of Undeclared have 'head', which it does not have",
    ),
    "no list": (
        lambda: make(Undeclared(PipelineParts((), "blocks.0", ()))),
        "the blocks 'blocks.0' of Undeclared must be a ModuleList, got Linear",
    ),
    "a parameter outside of the parts": (
        lambda: make(Undeclared(PipelineParts((), "blocks", ()))),
        "scale must be in the pipeline_parts of Undeclared, first, blocks or last",
    ),
    "a parameter of two stages": (
        lambda: make(shared_blocks()),
        r"blocks.0.attention.q_proj.weight and blocks.3.attention.q_proj.weight must be one parameter on one stage",
    ),
    "computes outside of its parts": (
        lambda: make(Scaled(), loss=squares).step(X, X),
        "must not compute with the hidden states outside of its pipeline_parts",
    ),
    "routers of ids": (
        lambda: make(decoder(BY_IDS)).step(*batch()),
        "token_ids must be given in a pipeline whose routers take ids of tok",
    ),
    "statistics before stages": (lambda: make(accumulating()), "model must have no StatsAccumulator yet"),
    "unknown schedule": (
        lambda: make(schedule="1f1"),
        "schedule must be one of 'gpipe', '1f1b', .*, got '1f1'; the nearest are '1f1b'",
    ),
    "too few micro-batches": (
        lambda: make(schedule="1f1b", num_micro_batches=1),
        r"num_micro_batches must be at least the number of stages \(2\) for the schedule '1f1b', got 1",
    ),
    "no micro-batches": (lambda: make(num_micro_batches=0), "num_micro_batches must be a positive int, got 0"),
    "micro-batches that make no rounds": (
        lambda: make(schedule="interleaved_1f1b", num_micro_batches=5),
        "num_micro_batches must be a multiple of 2, the number of rounds over 2 ranks, for the schedule .*, got 5",
    ),
    "stages per rank": (
        lambda: make(schedule="zbv", stages_per_rank=3),
        "stages_per_rank must be 2 for the schedule 'zbv', got 3",
    ),
    "blocks per stage": (
        lambda: make(blocks_per_stage=[1, 2]),
        r"blocks_per_stage must be 2 positive numbers with the sum 4, got \[1, 2\]",
    ),
    "unknown recomputation": (lambda: make(recompute=("block",)), "block"),
    "ranks that differ": (
        lambda: make(num_micro_batches=4 + dist.get_rank()),
        "the ranks must agree on num_micro_batches: rank 0 has 4, rank 1 has 5",
    ),
    "another loss": (
        lambda: make(loss=lambda output, _: output.logits).step(*batch()),
        r"loss must return the sum of the losses of all tokens as a 0-dim tensor, got shape \(2, 8, 32\), torch.float",
    ),
    "targets of another size": (
        lambda: make().step(batch()[0], batch()[1][:5]),
        r"targets must have 8 rows, as the inputs, got the shape \(5, 8\)",
    ),
    "inputs that differ between stages": (
        lambda: make().step(*(part[: 4 + dist.get_rank()] for part in batch())),
        r"the ranks must agree on the inputs: rank 0 has shape \(4, 8\).*, rank 1 has shape \(5, 8\)",
    ),
    "targets with a gradient": (
        lambda: make().step(batch()[0], torch.ones(8, 8, requires_grad=True)),
        "targets must not require a gradient, got one of shape",
    ),
    "inputs with a gradient": (
        lambda: make().step(torch.ones(8, 8, 16, requires_grad=True), batch()[1]),
        "inputs must not require a gradient",
    ),
    "parallelize": (
        lambda: parallelize(decoder(MIXTRAL), Mesh({"stage": 2})),
        r"mesh must have no axis 'stage', got Mesh\(stage=2\): maxmoe.pipeline cuts a model into stages",
    ),
}


def test_bad_input() -> None:
    def check() -> None:
        for name, (call, expected) in MISTAKES.items():
            found = error_of(call)
            assert re.search(expected, found), (name, found)
        error_of(pipeline, decoder(MIXTRAL), {"stage": 2}, loss=loss, num_micro_batches=2, kind=TypeError)
        error_of(make, loss=None, kind=TypeError)
        with torch.no_grad():
            error_of(make().step, *batch(), kind=RuntimeError)
        run, scaler = make(), torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        run.step(*batch())
        # Even if the gradients of this stage have one placement: another stage may overflow.
        message = error_of(scaler.step, torch.optim.SGD(run.parameters()), kind=RuntimeError)
        assert message.endswith("use maxmoe.parallel.GradScaler")

    run_ranks(check, 2)


def test_the_others_name_a_rank_that_fails_in_a_stage(tmp_path: Path) -> None:
    fail, delay, message = FAILURES[0]

    def train() -> None:
        mesh = Mesh({"stage": 2, "expert": 2}, timeout=timedelta(seconds=TIMEOUT))
        run = staged(SMALL, mesh, "default", "1f1b")
        run.step(*batch())
        if mesh.rank == 2:
            run.model.norm.register_forward_pre_hook(lambda *_: fail())
        run.step(*batch())

    check_rank_2_is_named(outcomes(tmp_path, train, patience=patience_with(fail)), fail, delay, message)
