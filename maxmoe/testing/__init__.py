"""Comparison of training on several processes with one process, for any model."""

from maxmoe.testing.report import Comparison, RankComparison
from maxmoe.testing.training_runs import compare_ranks

__all__ = ["Comparison", "RankComparison", "compare_ranks"]
