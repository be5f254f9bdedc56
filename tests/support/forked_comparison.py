"""`compare_ranks` of a case in forked processes, a hundredth of the time of starting them."""

from functools import partial

import torch

from maxmoe.testing import RankComparison
from maxmoe.testing.measurement import Training
from maxmoe.testing.rank_processes import RankProcesses
from maxmoe.testing.training_runs import Run
from support.compared_models import Case
from support.run_ranks import prepare


def compare(case: Case, timeout: float = 60.0, dtype: torch.dtype | None = None) -> RankComparison:
    training = Training(case.build, case.parallelize, case.make_batch, case.loss, case.step)
    processes = RankProcesses("fork", timeout, timeout, partial(prepare, False))
    return Run(training, case.num_ranks, dtype, None, processes).compare()
