"""The tables that the benchmarks print."""

import torch

from benchmarks import shapes
from benchmarks.results import Case, Result, summary_against_alternatives, table


def test_table_leaves_out_empty_columns() -> None:
    assert table(["name", "none", "ms"], [["a", "", "1.0"], ["bcd", "", "10"]]).splitlines() == [
        "name   ms",
        "----  ---",
        "a     1.0",
        "bcd    10",
    ]


def test_summary_compares_with_the_best_alternative() -> None:
    case = Case("A", shapes.A, torch.bfloat16, "forward")
    seconds = {"maxmoe": 2.0, "slow": 9.0, "fast": 5.0, "bound: mm bfloat16": 1.0, "bound: mm float32": 1.5}
    kinds = ["maxmoe", "alternative", "alternative", "bound", "bound"]
    results = [Result(case, name, kind, [t, t + 1]) for (name, t), kind in zip(seconds.items(), kinds, strict=True)]
    lines = summary_against_alternatives(results).splitlines()
    assert lines[3].split() == ["A", "bfloat16", "forward", "2000.0", "fast", "2.50", "0.50", "0.75"]
    assert lines[4] == "best alternative / maxmoe, forward: geometric mean 2.50, least 2.50"
