"""Comparison of training on several processes with one process, for any model."""

from maxmoe.testing.comparison import Comparison, RankComparison
from maxmoe.testing.ranks import compare_ranks

__all__ = ["Comparison", "RankComparison", "compare_ranks"]
