"""The common parts of all benchmarks: options, progress, Ctrl-C, the table, results.json and the picture."""

import argparse
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import figures, machine, timing
from benchmarks.admission import Admission
from benchmarks.alternatives import BOUNDS
from benchmarks.contender import TOLERANCE, Contender, mode_of
from benchmarks.problem import Problem
from benchmarks.results import Case, Result
from benchmarks.shapes import FORWARD_ONLY, LETTERS, AnyShape, named
from benchmarks.timing import Runner, round_robin

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


@dataclass
class Session:
    """A running benchmark: the options, and the results so far."""

    options: argparse.Namespace
    bar: tqdm
    results: list[Result] = field(default_factory=list)

    def time(self, case: Case, runners: list[Runner], numbers: Mapping[str, float] | None = None) -> None:
        """Time runners in turn."""
        results = [Result(case, each.name, each.kind, each.seconds, numbers=dict(numbers or {})) for each in runners]
        self.results.extend(results)
        try:
            for _ in round_robin(runners, self.options.rounds):
                self.bar.update(1 / self.options.rounds)
        finally:
            for result, each in zip(results, runners, strict=True):
                result.rounds = each.rounds

    def admit(self, case: Case, problem: Problem, contenders: Sequence[Contender], tolerance: float) -> list[Runner]:
        """Return runners of the contenders that can be timed; record why the others cannot."""
        runners, reasons = Admission(problem, mode_of(case), tolerance).runners(contenders)
        for contender in contenders:
            if reason := reasons.get(contender.name):
                self.results.append(Result(case, contender.name, contender.kind, absent=reason))
        return runners


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its command.

    Attributes:
        name: name of the command.
        description: text for --help.
        shapes: default shapes, by name; --shapes accepts the names of all shapes of this kind.
        modes: modes that are measured for each shape.
        measure: adds the results of a case to the session.
        report: returns the printed text.
        panels: returns the panels of the picture.
        is_timed: whether calls are timed, in rounds.
        chooses_bounds: whether there is an option for the bounds.
        threads: default number of threads.
        points: returns the shapes on the curve of a given shape, in each mode.
    """

    name: str
    description: str
    shapes: Mapping[str, AnyShape]
    modes: list[str]
    measure: Callable[[Session, Case], None]
    report: Callable[[list[Result]], str]
    panels: Callable[[list[Result]], Sequence[figures.Panel | figures.Curves]]
    is_timed: bool = True
    chooses_bounds: bool = False
    threads: int = 2
    points: Callable[[AnyShape, str], Sequence[AnyShape]] = lambda shape, mode: [shape]

    def cases(self, options: argparse.Namespace) -> list[Case]:
        """All combinations of shape, dtype and mode."""
        shapes = options.shapes.items()
        return [
            Case(name, point, dtype, mode)
            for name, shape in shapes
            for dtype in options.dtype
            for mode in self.modes
            for point in self.points(shape, mode)
            if not (name in FORWARD_ONLY and mode == "forward+backward")
        ]


def main(benchmark: Benchmark, arguments: list[str] | None = None) -> None:
    """Run a command."""
    options = parse_options(benchmark, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    description = machine.describe()
    cases = benchmark.cases(options)
    interrupted = False
    bar_format = "{desc}{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    with tqdm(total=len(cases), bar_format=bar_format, dynamic_ncols=True) as bar:
        session = Session(options, bar)
        try:
            for number, case in enumerate(cases):
                bar.set_description(f"{case.name}, {case.dtype_name}, {case.mode}")
                benchmark.measure(session, case)
                bar.update(number + 1 - bar.n)
        except KeyboardInterrupt:
            interrupted = True
    written = save(benchmark, session, description, interrupted)
    if interrupted:
        print("Interrupted. Results so far:\n")
    print(benchmark.report(session.results))
    print("\nWritten:", *written)


def save(benchmark: Benchmark, session: Session, description: dict[str, object], interrupted: bool) -> list[Path]:
    """Write the results to results.json, and a picture if there are panels."""
    options = session.options
    shown = {name: str(value) for name, value in vars(options).items()}
    rules = {"seconds_per_contender": timing.SECONDS_PER_CONTENDER, "min_rounds": timing.MIN_ROUNDS}
    contents = {
        "benchmark": benchmark.name,
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "interrupted": interrupted,
        "machine": description,
        "options": shown,
        # A slow contender skips rounds beyond its share of time, but none of the first rounds.
        "timing": rules if benchmark.is_timed else {},
        "results": [result.as_json() for result in session.results],
    }
    path = options.out / "results.json"
    path.write_text(json.dumps(contents, indent=1) + "\n")
    written = [path]
    panels = benchmark.panels(session.results)
    if panels:
        picture = options.out / f"{benchmark.name}.png"
        threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
        heading = f"{benchmark.name}: {description['cpu']}, {threads}, torch {torch.__version__}"
        figures.draw(picture, heading, panels)
        written.append(picture)
    return written


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the description and adds every default."""


def parse_options(benchmark: Benchmark, arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    program = f"python -m benchmarks.{benchmark.name}"
    parser = argparse.ArgumentParser(
        prog=program, description=benchmark.description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    first = next(iter(benchmark.shapes.values()))
    kind = type(first)
    known = named(kind)
    example = f"{'x'.join(map(str, first))} ({', '.join(LETTERS[name] for name in kind._fields)})"

    def shapes(text: str) -> dict[str, AnyShape]:
        return {name: known.get(name) or sizes(name, kind) for name in text.split(",")}

    def dtypes(text: str) -> list[torch.dtype]:
        return [DTYPES[name] for name in choices(text, DTYPES)]

    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/benchmarks") / benchmark.name, help="folder of the results")
    help_text = f"of {', '.join(known)}, or sizes, as in {example}"
    add("--shapes", type=shapes, default=",".join(benchmark.shapes), help=help_text)
    add("--dtype", type=dtypes, default="float32,bfloat16", help=f"of {', '.join(DTYPES)}")
    add("--threads", type=positive, default=benchmark.threads, help="of every contender")
    if benchmark.is_timed:
        add("--rounds", type=positive, default=10, help="turns of every contender")
    if benchmark.chooses_bounds:
        add(
            "--bound", type=lambda text: choices(text, BOUNDS), default=",".join(BOUNDS), help=f"of {', '.join(BOUNDS)}"
        )
    return parser.parse_args(arguments)


def choices(text: str, known: Collection[str]) -> list[str]:
    """Parse a list of known names, such as float32,bfloat16."""
    names = text.split(",")
    if unknown := set(names).difference(known):
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r} should be one of {', '.join(known)}")
    return names


def sizes(text: str, kind: type[AnyShape]) -> AnyShape:
    """Parse sizes, such as 2048x512."""
    numbers = [positive(number) for number in text.split("x")]
    if len(numbers) != len(kind._fields):
        raise argparse.ArgumentTypeError(f"{text!r} should be {len(kind._fields)} sizes: {', '.join(kind._fields)}")
    return kind(*numbers)


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number, at least 1")
    return int(text)
