"""The numbers of the curves over rows per expert and over sizes."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import figures, layer, rows_per_expert, shapes, sizes
from benchmarks.results import Case, Result


def test_time_per_row_over_rows_per_expert() -> None:
    results = []
    for num_tokens, seconds in ((8, 64e-6), (16, 64e-6)):  # 1 and 2 rows for each of 64 experts
        case = Case("B", shapes.B._replace(num_tokens=num_tokens), torch.float32, "forward")
        results += [
            Result(case, "maxmoe", "maxmoe", [9.0, seconds]),
            Result(case, "bound: mm float32", "bound", [seconds / 4]),
            Result(case, "bound: bandwidth", "bound", [seconds / 2]),
        ]
    [panel] = rows_per_expert.panels(results)
    assert panel.title == "B (D 512, F 192, E 64, K 8), float32, forward"
    assert panel.curves[0] == figures.Curve("maxmoe", "maxmoe", [1, 2], pytest.approx([1.0, 0.5]))
    lines = rows_per_expert.report(results).splitlines()
    assert lines[1].startswith("rows per expert  maxmoe  bound: mm float32  bound: bandwidth  larger bound / maxmoe")
    assert [line.split() for line in lines[3:]] == [
        ["1", "1", "0.25", "0.5", "0.50"],
        ["2", "0.5", "0.125", "0.25", "0.50"],
    ]


def test_gflops_over_sizes() -> None:
    results = []
    for mode in sizes.VARYING:
        for shape in sizes.points(shapes.ProductShape(250, 2000, 1000), mode)[:2]:
            case = Case("some", shape, torch.float32, mode)
            flops = 2 * 250 * (1000 if mode == "D varies" else 2000) * sizes.size(case)
            results += [Result(case, "gmm", "maxmoe", [flops / 3e9]), Result(case, "bound: mm", "bound", [flops / 6e9])]
    panels = sizes.panels(results)
    assert [panel.title for panel in panels] == [
        "some (R 250, F 1000), float32, D varies",
        "some (R 250, D 2000), float32, F varies",
    ]
    for panel in panels:
        assert panel.curves == [
            figures.Curve("gmm", "maxmoe", [64, 128], pytest.approx([3, 3])),
            figures.Curve("bound: mm", "bound", [64, 128], pytest.approx([6, 6])),
        ]
    assert sizes.report(results).splitlines()[3].split() == ["64", "3", "6", "0.50"]


def test_products_are_those_of_the_sizes() -> None:
    calls = sizes.make_calls(shapes.ProductShape(5, 4, 3), torch.float32)
    outputs = {name: call() for name, call in calls.items()}
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {
        "gmm": (5, 3),
        "gmm, transposed weights": (5, 3),
        "tgmm": (1, 4, 3),
        "bound: mm": (5, 3),
    }


def test_share_of_the_experts_in_the_layer() -> None:
    case = Case("A", shapes.A, torch.float32, "forward")
    results = [Result(case, "maxmoe", "maxmoe", [4.0]), Result(case, "maxmoe, experts alone", "part", [3.0])]
    last = layer.summary(results).splitlines()[-1]
    assert last.split() == ["A", "float32", "forward", "4000.0", "3000.0", "0.75", "25.0%"]
