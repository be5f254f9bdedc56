"""The numbers of micro-batches that a schedule can run."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.parallel import Declaration, PipelineParts
from maxmoe.pipelining import pipeline
from maxmoe.pipelining.schedules import SCHEDULES, check_schedule
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks
from support.sampling import by_default


class Linears(nn.Module):
    """Four small blocks, whose results are not tested here: two ranks can have two stages each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.declaration = Declaration(pipeline_parts=PipelineParts((), "blocks", ()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("name", by_default(SCHEDULES, ["interleaved_1f1b"]))
def test_torch_runs_every_number_that_is_accepted(name: str) -> None:
    accepted = []
    for count in range(1, 9):
        try:
            check_schedule(name, 2, None, count)
        except ValueError:
            continue
        accepted.append(count)
    assert accepted == {
        "1f1b": [2, 3, 4, 5, 6, 7, 8],
        "dual_pipe_v": [4, 5, 6, 7, 8],
        "interleaved_1f1b": [1, 2, 3, 4, 6, 8],
        "interleaved_zero_bubble": [1, 2, 3, 4, 6, 8],
    }.get(name, [1, 2, 3, 4, 5, 6, 7, 8])

    def check() -> None:
        for count in accepted:
            run = pipeline(Linears(), Mesh({"stage": 2}), loss=F.mse_loss, schedule=name, num_micro_batches=count)
            run.step(torch.ones(count, 4), torch.ones(count, 4))

    run_ranks(check, 2)
