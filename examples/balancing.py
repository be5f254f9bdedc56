"""Train one small language model with each way to balance the load, and compare load, loss and specialisation.

    python examples/balancing.py                                   all ways with two seeds, five minutes each
    python examples/balancing.py --ways sign quantile --seeds 0 --steps 400

Other options are the ones of examples/pretrain.py: the text, the sizes, the steps. All runs of a seed start from the
same parameters and read the same batches. Results are kept in balancing.json in the folder --out, and a run that is
in there already is not repeated. The table is written to balancing.md and the picture to balancing.png.

Specialisation is the mutual information, in bits, of a byte of the held-out text and the experts that it is routed to.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import pretrain
from load_balancing import figures
from load_balancing.training import WAYS, Run, train
from pretraining.command import HelpFormatter, exit_status, prepare_output
from pretraining.corpus import load_corpus

COLUMNS = ("balanced by", "bits per byte", "busiest / mean", "experts without a token", "specialisation, bits")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to balance the load")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds of parameters and data order")
    parser.add_argument("--out", type=Path, default=Path("runs/balancing"), help="folder of the results")
    chosen, others = parser.parse_known_args(arguments)
    options = pretrain.parse_options([*others, "--out", str(chosen.out)])
    options.ways, options.seeds = chosen.ways, chosen.seeds
    return options


def run(options: argparse.Namespace) -> int:
    """Run the trainings that have no results yet, write table and picture, and return the exit status."""
    prepare_output(options.out, "balancing.md", "balancing.png")
    corpus = load_corpus(options.data, options.sequence_length)
    free = ("ways", "seeds", "seed", "out", "data")
    settings = {name: str(value) for name, value in vars(options).items() if name not in free}
    settings["data"] = corpus.fingerprint
    path = options.out / "balancing.json"
    runs = read(path, settings)
    for seed in options.seeds:
        for way in options.ways:
            if (way, seed) not in runs:
                runs[way, seed] = train(argparse.Namespace(**{**vars(options), "seed": seed}), corpus, way)
                results = {"settings": settings, "runs": [asdict(one) for one in runs.values()]}
                path.write_text(json.dumps(results))
    found = [runs[way, seed] for way in options.ways for seed in options.seeds]
    lines = table(found)
    print(lines)
    (options.out / "balancing.md").write_text(lines)
    figures.comparison(options.out / "balancing.png", found)
    return 0


def read(path: Path, settings: dict[str, Any]) -> dict[tuple[str, int], Run]:
    """Return the results of earlier runs with the same settings."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text())
    if results["settings"] != settings:
        raise pretrain.InputError(f"{path} has results of other options: choose another --out")
    runs = [Run(**{**one, "held_out": [tuple(pair) for pair in one["held_out"]]}) for one in results["runs"]]
    return {(one.way, one.seed): one for one in runs}


def table(runs: list[Run]) -> str:
    """Return a row per way: the mean over the seeds, and the values of the seeds."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for way in dict.fromkeys(one.way for one in runs):
        of_way = [one for one in runs if one.way == way]
        values = (
            cell([one.held_out[-1][1] for one in of_way], 3),
            cell([one.last_load for one in of_way], 2),
            cell([float(one.dead) for one in of_way], 1),
            cell([one.specialisation for one in of_way], 2),
        )
        lines.append(f"| {way} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def cell(values: list[float], digits: int) -> str:
    """Return the mean, and the values if there are several."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in values)})"


if __name__ == "__main__":
    sys.exit(exit_status("balancing", lambda: run(parse_options())))
