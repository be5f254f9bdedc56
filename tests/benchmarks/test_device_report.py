"""The tables of a device check: the tables in docs are the output of `benchmarks.device_report`."""

from pathlib import Path

import pytest

from benchmarks import device_report

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("devices.md", "performance.md")]
RUNS = sorted((ROOT / "benchmarks/device_results").iterdir())


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_the_tables_of_the_pages_are_up_to_date(folder: Path) -> None:
    sections = device_report.read(folder)
    tables = device_report.tables(sections)
    assert len(tables) > 5
    assert not [table for table in tables if not any(table in page for page in PAGES)]
    assert sections["machine"]["device"] in PAGES[0] and sections["machine"]["driver"] in PAGES[0]


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_kernels_are_counted_once(folder: Path) -> None:
    """The kinds add up to the time of all kernels."""
    lines = device_report.kernels_table(device_report.read(folder)).splitlines()[2:]
    assert lines
    for line in lines:
        total, *kinds = map(float, line.strip("| ").split(" | ")[2:])
        assert abs(sum(kinds) - total) < 0.03


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("tensor_core::multiply<BFloat16, true>", "products"),
        ("gather_rows<maxmoe::BFloat16, 8>", "gather, scatter"),
        ("sum_rows<maxmoe::BFloat16, 8, 2>", "sum over slots"),
        ("backward_of_rows<maxmoe::BFloat16, 8, maxmoe::cuda::AnyForm>", "activation, weights, copies"),
        ("sum_experts", "sort, plan, checks"),
    ],
)
def test_kernels_of_maxmoe_have_a_kind(kernel: str, kind: str) -> None:
    assert device_report.kind_of(f"void maxmoe::cuda::(anonymous namespace)::{kernel}(long, bool)") == kind


def test_what_failed_or_was_not_run_is_said() -> None:
    """Cases that were not measured have no row."""
    passed = {"dtype": "float32", "error": 1e-6, "limit": 1e-5, "same_bits": True, "ok": True}
    failed = {"ok": False, "error_message": "RuntimeError: no memory", "traceback": ""}
    missing = {"not_run": "no time was left"}
    measured = {"ms": 2.0, "tflops": 10.0, "peak_mb": 4}
    sections = {
        "operators": {
            "operators": {"gmm": passed, "tgmm": passed | {"error": 9e-6, "ok": False, "same_bits": False}},
            "experts": {"float32": failed},
            "device": {"no wait": failed, "cuda graph": missing, "side stream": {"ok": True}},
        },
        "models": {"training": {"AdamW": failed}},
        "speed": {
            "ceilings": {"product": {"tflops": 20.0}},
            "small: forward": {"ours": measured, "grouped_mm by hand": measured | {"ms": 1.0}},
            "large: forward": {"ours": failed, "grouped_mm by hand": measured},
        },
        "kernels": {"large: forward": {"ours": failed}},
        "rows": {
            "ceilings": {"copy": {"gb_per_second": 4000.0}},
            "Mixtral": {"ragged_gather": {"ms": 0.5, "aten_ms": 1.0, "bytes": 10**9}, "ragged_dot": failed},
            "candidates of the sum": {
                "4 rows ahead": {"ms": 0.25, "bytes": 9},
                "8 rows ahead": {"ms": 0.5, "bytes": 9},
            },
            "gmm, float16": {
                f"{rows} rows per group": {"ms": ms, "aten_ms": 1.0, "flops": 10**11, "rows": rows}
                for rows, ms in ((32, 0.5), (512, 2.0), (2048, 4.0))
            },
        },
        "threads": {"avx2": {"A, float32, 1 threads": missing}},
    }
    errors, cases, training, speed, memory, kernels, rows, threads = device_report.tables(sections)
    assert "| operators, float32 | 1 of 2 | 9.0e-06 | 1.0e-05 | no |" in errors
    assert "| experts | 0 of 1 | | | |" in errors
    for line in ("| no wait | failed |", "| cuda graph | not run: no time was left |", "| side stream | passed |"):
        assert line in cases
    assert "| small, forward | 0.50 | 2.00 | 1.00 | 10 (0.50) | 10 (0.50) |" in speed and "large" not in speed
    assert "| small, forward | 1.00 | 4 | 4 |" in memory
    assert "| Mixtral: ragged_gather | 0.500 | 1.000 | 2.00 | 2000 GB/s | 0.50 |" in rows and "ragged_dot" not in rows
    assert "| gmm, float16: 512 rows per group | 2.000 | 1.000 | 0.50 | 50 TFLOP/s | |" in rows
    decided = list(device_report.decisions(sections))
    assert decided[0] == "Mixtral: ragged_gather: ours"
    assert decided[-3:] == [
        "gmm, float16: 2048 rows per group: of PyTorch",
        "candidates of the sum: 4 rows ahead (4 rows ahead 0.250 ms, 8 rows ahead 0.500 ms)",
        "gmm, float16: PyTorch's products are faster from 512 rows per group on (kManyRowsPerGroup)",
    ]
    assert all(table.count("\n") == 1 for table in (training, kernels, threads))
