"""The numbers of micro-batches that a schedule can run."""

import pytest
import torch

from maxmoe.pipelining import pipeline
from maxmoe.pipelining.schedules import SCHEDULES, check_schedule
from maxmoe.sharding import Mesh
from pipelining.staged_models import Model, squares
from support.run_ranks import run_ranks
from support.slow_cases import by_default


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
            run = pipeline(Model(), Mesh({"stage": 2}), loss=squares, schedule=name, num_micro_batches=count)
            x = torch.ones(count, 6, dtype=torch.float64)
            run.step(x, x)

    run_ranks(check, 2)
