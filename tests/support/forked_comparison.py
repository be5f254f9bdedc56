"""`compare_ranks` of a case whose functions need no name in a module."""

import torch

from maxmoe.testing import RankComparison
from maxmoe.testing.measurement import Training
from maxmoe.testing.training_runs import Run
from support.compared_models import Case
from support.run_ranks import ByValue, rank_processes


def compare(case: Case, timeout: float = 60.0, dtype: torch.dtype | None = None) -> RankComparison:
    __tracebackhide__ = True  # by pytest
    functions = case.build, case.parallelize, case.make_batch, case.loss, case.step, case.make_update
    training = Training(*(function and ByValue(function) for function in functions), case.steps)  # type: ignore[call-arg]
    return Run(training, case.num_ranks, dtype, None, rank_processes(timeout, timeout)).compare()
