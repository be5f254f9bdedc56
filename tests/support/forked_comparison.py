"""`compare_ranks` of a case whose functions need no name, in forks of the server that `rank_server` describes."""

from functools import partial

import torch

from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.testing import RankComparison
from maxmoe.testing.measurement import Training
from maxmoe.testing.training_runs import Run
from support.call_in_fork import call_in_fork
from support.compared_models import Case
from support.run_ranks import LONGER, prepare

NUM_STARTS = 10  # upper bound for the starts of processes in a comparison


def compare(case: Case, timeout: float = 60.0, dtype: torch.dtype | None = None) -> RankComparison:
    __tracebackhide__ = True  # by pytest
    functions = case.build, case.parallelize, case.make_batch, case.loss, case.step, case.make_update
    training = Training(*functions, case.steps)
    processes = RankProcesses("fork", timeout, timeout, partial(prepare, False))
    comparison = Run(training, case.num_ranks, dtype, None, processes)
    found: RankComparison = call_in_fork(comparison.compare, seconds=NUM_STARTS * timeout + LONGER)
    return found
