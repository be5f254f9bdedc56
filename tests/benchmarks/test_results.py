"""The ratios that the benchmarks print."""

import torch

from benchmarks import shapes
from benchmarks.results import Case, Result, summary_against_alternatives


def test_summary_compares_with_the_best_alternative_and_the_larger_bound() -> None:
    case = Case("A", shapes.A, torch.bfloat16, "forward")
    seconds = {"maxmoe": 2.0, "maxmoe, linear": 4.0, "slow": 9.0, "fast": 5.0}
    seconds |= {"bound: mm bfloat16": 1.0, "bound: mm float32": 3.0, "bound: bandwidth": 1.5}
    kinds = ["maxmoe"] * 2 + ["alternative"] * 2 + ["bound"] * 3
    results = [Result(case, name, kind, [t, t + 1]) for (name, t), kind in zip(seconds.items(), kinds, strict=True)]
    lines = summary_against_alternatives(results).splitlines()
    assert "FLOP bound / ours  float32 FLOP bound / ours  bandwidth bound / ours  larger bound / ours" in lines[1]
    assert lines[3].split()[3:] == ["maxmoe", "2000.0", "fast", "2.50", "0.50", "1.50", "0.75", "0.75"]
    assert lines[4].split()[4:] == ["linear", "4000.0", "fast", "1.25", "0.25", "0.75", "0.38", "0.38"]
    assert lines[5] == "best alternative / maxmoe, forward: geometric mean 2.50, least 2.50"
