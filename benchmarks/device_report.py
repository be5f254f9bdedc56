"""Results of a device check (tests/device/run.sh) as tables.

    python -m benchmarks.device_report benchmarks/device_results/h100_2026-11-26

docs/devices.md and docs/performance.md show them.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Values = dict[str, Any]
Groups = dict[str, dict[str, Values]]

# Groups whose cases are summed up, with the largest error of each.
SUMMED = (
    "operators",
    "operators, through ATen",
    "experts",
    "experts, through ATen",
    "layers, float64",
    "layers, float32",
    "quantized experts",
)
OURS, OURS_FUSED = "ours", "ours, gate and up in one"
# Kinds by patterns of CUDA kernel names, of PyTorch and of maxmoe; the first match counts. The sum over the slots of a
# token is in float32, all other elementwise passes are in bfloat16.
KINDS = {
    "products": r"cutlass|gemm|tensor_core|multiply_add",
    "gather, scatter": r"gather_kernel<16|indexFunc|index_elementwise|scatter_add|gather_rows|add_slots",
    "sum over slots": r"sum_rows|EmbeddingBag|Functor_add<float>|BinaryFunctor<float|unrolled_elementwise"
    r"|masked_fill_kernel|bfloat16_copy",
    "activation, weights, copies": r"activate_elements|backward_of_rows|multiply_rows"
    r"|elementwise_kernel<(4|8|128)|CatArray|reduce_kernel<512, 1, .*BFloat16",
}
REST = "sort, plan, checks"
INTEGERS = r"<long|long>|<bool|clamp_scalar|_scatter_gather"  # elementwise kernels of the plan


def read(folder: Path) -> dict[str, Any]:
    """Return the sections of a run; `prototype` has a separate file."""
    sections: dict[str, Any] = json.loads((folder / "results.json").read_text())
    prototype = folder / "prototype.json"
    return sections | ({"prototype": json.loads(prototype.read_text())} if prototype.exists() else {})


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [[f" {cell} " if cell else " " for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def machine_line(sections: dict[str, Any]) -> str:
    """Return the machine of the measurements."""
    facts = sections["machine"]
    amx = " with AMX" if "amx_bf16" in facts["cpu_flags"] else ""
    return (
        f"{facts['device']}, driver {facts.get('driver', 'none')}, torch {facts['torch']}, {facts['cpu']}{amx}, "
        f"{facts['cpus']} cores, {facts['date']}"
    )


def number(value: float) -> str:
    """Return three significant digits, with an exponent for errors."""
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3g}"


def state(values: Values) -> str:
    """Return the result of a case without an error."""
    if "not_run" in values:
        return f"not run: {values['not_run'].partition('. ')[0]}"
    return "passed" if values.get("ok", True) else "failed"


def errors_table(sections: dict[str, Any]) -> str:
    """Return the error of every group in `SUMMED` that is closest to its limit."""
    cases: dict[str, list[Values]] = {}
    for step in ("operators", "layers"):
        for group, named in sections.get(step, {}).items():
            for values in named.values() if group in SUMMED else ():
                name = f"{group}, {values['dtype']}" if "dtype" in values else group
                cases.setdefault(name, []).append(values)
    header = ["", "cases passed", "largest error", "its limit", "same bits twice"]
    return table(header, [errors_row(name, group) for name, group in cases.items()])


def errors_row(name: str, group: list[Values]) -> list[str]:
    measured = [values for values in group if "error" in values]
    if not measured:
        return [name, f"0 of {len(group)}", "", "", ""]
    worst = max(measured, key=lambda values: values["error"] / values["limit"])
    passed = f"{sum(state(values) == 'passed' for values in group)} of {len(group)}"
    repeated = [values["same_bits"] for values in measured if "same_bits" in values]
    same_bits = ("yes" if all(repeated) else "no") if repeated else ""
    return [name, passed, number(worst["error"]), number(worst["limit"]), same_bits]


def cases_table(sections: dict[str, Any]) -> str:
    """Return the cases of all other groups, one by one."""
    groups: Groups = {}
    for step in ("operators", "layers", "models"):
        groups |= {name: cases for name, cases in sections.get(step, {}).items() if name not in (*SUMMED, "training")}
    rows = [
        [name, state(values), number(values["error"]) if "error" in values else ""]
        for cases in groups.values()
        for name, values in cases.items()
    ]
    return table(["", "", "error"], rows)


def training_table(sections: dict[str, Any]) -> str:
    """Return the losses of trained decoders."""
    losses, errors = ("first_loss", "last_loss", "last_loss_on_cpu"), ("error", "limit")
    rows = [
        [name, *(f"{values[key]:.4f}" for key in losses), *(number(values[key]) for key in errors)]
        for name, values in sections["models"]["training"].items()
        if "error" in values
    ]
    header = ["optimizer", "first loss", "last loss", "last loss, CPU", "largest difference of the losses", "its limit"]
    return table(header, rows)


def timed(sections: dict[str, Any], key: str) -> Iterator[tuple[str, Values, Values, dict[str, Values]]]:
    """Yield layer, mode, maxmoe, the best by hand and all contenders, if maxmoe and by hand have been measured."""
    for group, contenders in sections["speed"].items():
        measured = {name: values for name, values in contenders.items() if key in values}
        by_hand = [values for name, values in measured.items() if name.startswith("grouped_mm")]
        if group != "ceilings" and OURS in measured and by_hand:
            best = min(by_hand, key=lambda values: values[key])
            yield group.replace(": ", ", "), measured[OURS], best, measured


def speed_table(sections: dict[str, Any]) -> str:
    """Return times beside `grouped_mm` by hand and the ceiling of products; in brackets with gate and up in one."""
    ceiling = sections["speed"]["ceilings"]["product"]["tflops"]
    rows = []
    for name, ours, hand, contenders in timed(sections, "ms"):
        fused = f" ({hand['ms'] / contenders[OURS_FUSED]['ms']:.2f})" if OURS_FUSED in contenders else ""
        times = [f"{hand['ms'] / ours['ms']:.2f}{fused}", f"{ours['ms']:.2f}", f"{hand['ms']:.2f}"]
        rates = [f"{each['tflops']:.0f} ({each['tflops'] / ceiling:.2f})" for each in (ours, hand)]
        rows.append([name, *times, *rates])
    header = ["", "by hand, its time / ours", "ours, ms", "by hand, ms"]
    return table([*header, "ours, TFLOP/s (share of the ceiling)", "by hand, TFLOP/s"], rows)


def memory_table(sections: dict[str, Any]) -> str:
    """Return peaks of allocated memory."""
    rows = [
        [name, f"{hand['peak_mb'] / ours['peak_mb']:.2f}", str(ours["peak_mb"]), str(hand["peak_mb"])]
        for name, ours, hand, _ in timed(sections, "peak_mb")
    ]
    return table(["", "by hand, its peak / ours", "ours, MB", "by hand, MB"], rows)


def kind_of(kernel: str) -> str:
    is_integer = re.search(INTEGERS, kernel) and not re.search(
        r"maxmoe|cutlass|gather_kernel<16|indexFunc|EmbeddingBag", kernel
    )
    return REST if is_integer else next((kind for kind, names in KINDS.items() if re.search(names, kernel)), REST)


def kernels_table(sections: dict[str, Any]) -> str:
    """Return the time of kernels by kind."""
    rows = []
    for group, contenders in sections["kernels"].items():
        for contender, values in contenders.items():
            if "kernels" not in values:
                continue
            times = dict.fromkeys([*KINDS, REST], 0.0)
            for kernel in values["kernels"]:
                times[kind_of(kernel["kernel"])] += kernel["us"] / 1e3
            totals = [f"{values['launches']:.0f}", f"{values['us'] / 1e3:.2f}"]
            name = group.replace(": ", ", ")
            rows.append([f"{name}: {contender}", *totals, *(f"{time:.2f}" for time in times.values())])
    return table(["kernel time, ms", "kernels", "all", *KINDS, REST], rows)


def paired(sections: dict[str, Any]) -> Iterator[tuple[str, str, Values]]:
    """Yield shape, operator and values of the operators that were timed through kernel and ATen."""
    for group, named in sections["rows"].items():
        yield from ((group, name, values) for name, values in named.items() if "aten_ms" in values)


def rows_table(sections: dict[str, Any]) -> str:
    """Return the time of each operator, its rate, and the rate as a share of a copy of memory."""
    copy = sections["rows"].get("ceilings", {}).get("copy", {}).get("gb_per_second")
    rows = []
    for group, name, values in paired(sections):
        times = [f"{values['ms']:.3f}", f"{values['aten_ms']:.3f}", f"{values['aten_ms'] / values['ms']:.2f}"]
        if "flops" in values:
            rates = [f"{values['flops'] / values['ms'] / 1e9:.0f} TFLOP/s", ""]
        else:
            rate = values["bytes"] / values["ms"] / 1e6
            rates = [f"{rate:.0f} GB/s", f"{rate / copy:.2f}" if copy else ""]
        rows.append([f"{group}: {name}", *times, *rates])
    return table(["", "ours, ms", "PyTorch's, ms", "PyTorch's / ours", "ours, rate", "share of a copy"], rows)


def decisions(sections: dict[str, Any]) -> Iterator[str]:
    """Yield which implementation was faster, for each operator and size, and the limit of cpp/ops/grouped_mm.cpp."""
    faster: dict[str, list[int]] = {}
    for group, name, values in paired(sections) if "rows" in sections else ():
        is_ours = values["ms"] <= values["aten_ms"]
        yield f"{group}: {name}: {'ours' if is_ours else 'of PyTorch'}"
        if "rows" in values:
            faster.setdefault(group, []).extend([] if is_ours else [values["rows"]])
    for group, named in sections.get("rows", {}).items():
        times = {name: values["ms"] for name, values in named.items() if "ms" in values}
        if group.startswith("candidates") and times:
            listed = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
            yield f"{group}: {min(times, key=lambda name: times[name])} ({listed})"
    for group, rows in faster.items():
        least = f"from {min(rows)} rows per group on" if rows else "at no number of rows that was timed"
        yield f"{group}: PyTorch's products are faster {least} (kManyRowsPerGroup)"


def prototype_table(sections: dict[str, Any]) -> str:
    """Return the rates of the prototype's kernels."""
    layers = sections["prototype"]
    rows = []
    for kernel, values in next(iter(layers.values())).items():
        units = [name for name in values if name in ("GB/s", "TFLOP/s")]
        rows += [[kernel, unit, *(f"{named[kernel][unit]:.0f}" for named in layers.values())] for unit in units]
    return table(["", "", *layers], rows)


def threads_tables(sections: dict[str, Any]) -> Iterator[str]:
    """Yield a table for each instruction set."""
    for setting, cases in sections["threads"].items():
        cells: dict[str, dict[int, str]] = {}
        for name, values in cases.items():
            if "ours_ms" in values:
                cell = f"{values['bound_over_ours']:.2f} ({values['ours_ms']:.0f} ms)"
                cells.setdefault(name.rpartition(", ")[0], {})[values["threads"]] = cell
        counts = sorted({count for by_count in cells.values() for count in by_count})
        rows = [[shape, *(by_count.get(count, "") for count in counts)] for shape, by_count in cells.items()]
        yield table([f"{setting}: bound / maxmoe", *(f"{count} thread{'s' * (count > 1)}" for count in counts)], rows)


def tables(sections: dict[str, Any]) -> list[str]:
    """Return all tables of a run."""
    parts = {
        "operators": [errors_table, cases_table],
        "models": [training_table],
        "speed": [speed_table, memory_table],
        "kernels": [kernels_table],
        "rows": [rows_table],
        "prototype": [prototype_table],
    }
    made = [make(sections) for section, makers in parts.items() if section in sections for make in makers]
    return [*made, *(threads_tables(sections) if "threads" in sections else ())]


def main(arguments: Sequence[str]) -> None:
    """Print the tables of a folder."""
    sections = read(Path(arguments[0]))
    print(machine_line(sections), *tables(sections), "\n".join(decisions(sections)), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
