"""GFLOP/s of one grouped product over its sizes, powers of two and others: `gmm`, `tgmm` and `torch.mm`.

A group of R rows is multiplied by its matrix: ``(R, D)`` by ``(D, F)``, the matrix row-major or a transposed view;
`tgmm` multiplies the rows of D, transposed, by rows of F. Every call allocates its result, for `torch.mm` as for
maxmoe, so that the time includes pages that the system clears. A shape gives two curves: D varies with its F, F with
its D.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import curves
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE, disagreement
from benchmarks.figures import Curves
from benchmarks.results import Case, Result, bounds_of
from benchmarks.shapes import PRODUCTS, AnyShape, ProductShape
from benchmarks.timing import Runner
from maxmoe.ops import gmm, tgmm

SIZES = (64, 128, 192, 512, 768, 1024, 1536, 2048, 3072, 4096, 7168, 8192, 14336, 16384)
VARYING = {"D varies": "hidden_size", "F varies": "intermediate_size"}
DEFAULT = "R256-768"


def points(shape: AnyShape, mode: str) -> list[ProductShape]:
    """The shape with each of the sizes."""
    assert isinstance(shape, ProductShape)
    return [shape._replace(**{VARYING[mode]: size}) for size in SIZES]


def make_calls(shape: ProductShape, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The products, by name, on the same numbers."""
    R, D, F = shape
    generator = torch.Generator().manual_seed(0)
    rows, rows_of_F, matrix = (
        torch.randn(size, generator=generator).mul_(D**-0.5).to(dtype) for size in ((R, D), (R, F), (D, F))
    )
    weights = matrix.unsqueeze(0)
    transposed = weights.mT.contiguous().mT
    group_sizes = torch.tensor([R])
    return {
        "gmm": lambda: gmm(rows, weights, group_sizes),
        "gmm, transposed weights": lambda: gmm(rows, transposed, group_sizes),
        "tgmm": lambda: tgmm(rows, rows_of_F, group_sizes, 1),
        "bound: mm": lambda: torch.mm(rows, matrix),
    }


def measure(session: Session, case: Case) -> None:
    """Time all products of one size."""
    assert isinstance(case.shape, ProductShape)
    calls = make_calls(case.shape, case.dtype)
    expected = calls["bound: mm"]()
    for name in ("gmm", "gmm, transposed weights"):
        if reason := disagreement({"output": calls[name]()}, {"output": expected}, TOLERANCE[case.dtype]):
            raise RuntimeError(f"{name} and torch.mm differ: {reason}")
    del expected
    kinds = {name: "bound" if name.startswith("bound") else "maxmoe" for name in calls}
    session.time(case, [Runner(name, call, kinds[name]) for name, call in calls.items()])


def size(case: Case) -> float:
    """The size that varies."""
    return float(getattr(case.shape, VARYING[case.mode]))


def gflops(result: Result) -> float:
    """GFLOP/s, with two operations per multiply-add."""
    assert isinstance(result.case.shape, ProductShape)
    R, D, F = result.case.shape
    return 2 * R * D * F / result.best / 1e9


def ratios(group: list[Result]) -> dict[str, float]:
    """The time of `torch.mm` relative to maxmoe."""
    bound = bounds_of(group).get("mm")
    ours = [result for result in group if result.kind == "maxmoe"]
    return {f"mm / {each.contender}": bound / each.best for each in ours} if bound else {}


AXES = curves.Axes("size", size, "GFLOP/s", gflops, "linear", ratios)


def report(results: list[Result]) -> str:
    """The tables."""
    return curves.tables(results, AXES)


def panels(results: list[Result]) -> list[Curves]:
    """The curves."""
    return curves.panels(results, AXES)


BENCHMARK = Benchmark(
    "sizes", __doc__, {DEFAULT: PRODUCTS[DEFAULT]}, list(VARYING), measure, report, panels, threads=1, points=points
)

if __name__ == "__main__":
    main(BENCHMARK)
