"""Plan a model on a mesh without a cluster, compare ranks with one process, or describe this installation.

    python -m maxmoe plan --preset deepseek_v3 --world-size 2048 --device h100 --batch-size 4096
    python -m maxmoe explain --preset deepseek_v3 --rules shard-exp-on-fsdp --mesh fsdp=16,expert=16
    python -m maxmoe compare_ranks my_training --num-ranks 4
    python -m maxmoe info

`plan` searches for the fastest plans of a model that fit in memory.

`explain` prints the sharding of every parameter and the dispatch of tokens to experts, both with the reasons, the
memory per rank and the collectives per step. The model is a `maxmoe.models.Decoder` with the sizes of a published one;
its parameters are not allocated.

`compare_ranks` compares a training step on several ranks with one process, see `maxmoe.testing.compare_ranks`. It takes
a module with the functions build_model, parallelize, make_batch and loss, and step if there is one. It exits with 0 if
loss, outputs and gradients are equal, with 1 if they differ, and with 2 if they cannot be compared.

`info` prints versions, build and processor, for bug reports, and how threads wait for each other.
"""

import argparse
import importlib
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import torch

from maxmoe._library import build_info
from maxmoe.cli.plan import add_plan, add_state_dtypes, published, state_dtypes
from maxmoe.cli.waiting_threads import waiting_of_this_process
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.planning.estimate import Optimizer, estimate
from maxmoe.planning.explain import explain
from maxmoe.presets.published import PUBLISHED
from maxmoe.ranks.failures import RankError
from maxmoe.sharding.mesh import Mesh, parse_mesh
from maxmoe.sharding.rules import LogicalRules, preset_names
from maxmoe.testing import RankComparison, compare_ranks
from maxmoe.text_table import paragraph, readable_bytes, terminal_width

SIZES = ("num_layers", "num_dense_layers", "num_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
TRAINING = ("build_model", "parallelize", "make_batch", "loss")
CONVENTIONS = (
    "Memory is counted at the beginning of the backward. Parameters are {dtype}; so are gradients and optimizer state "
    "without dtypes of their own. "
    "Gathered parameters: those of the largest module and of the model itself. Activations: the tensors that autograd "
    "saves on the CPU. Recomputed activations: those of the module with the most. Work space and the all-reduces of "
    "losses, statistics and the gradient norm are not counted.",
    "Bytes that each of n ranks in a ring sends, and receives: (n - 1) / n of the whole tensor for all-gather and "
    "reduce-scatter, twice that for all-reduce, one ring per axis; axes joined by a comma are one ring. All-to-all: "
    "(n - 1) / n of all rows of a rank, with equally many rows per expert; for Muon, the mean over the ranks.",
)

STAGE_CONVENTION = (
    "Pipeline stages: bytes are those of one rank. Work: multiplications per token with weights, relative to the mean "
    "of the stages. In flight: the most micro-batches whose forward has run and whose backward has not. Activations: "
    "those of the micro-batches in flight. Unsharded: gradients of whole parameters, which FSDP2 keeps until the last "
    "backward of a stage. Gathered: parameters of all stages of a rank. Sent: hidden states and their gradients, to "
    "the ranks of other stages in a step."
)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; None for the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m maxmoe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("info", help="print versions, build and processor").set_defaults(report=describe)
    command = commands.add_parser(
        "explain", help="print the plan of a model", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.set_defaults(report=plan)
    add = command.add_argument
    add("--preset", required=True, help=f"the model: {', '.join(PUBLISHED)}")
    add("--rules", default="default", help=f"a preset of rules, or a YAML file: {', '.join(preset_names())}")
    add("--allow-unused", action="store_true", help="accept axes and names of rules that have no effect")
    add("--mesh", required=True, help="axes and sizes, as fsdp=16,expert=16; one may be -1 with --world-size")
    add("--world-size", type=positive, help="number of ranks, if not the product of the sizes")
    add("--batch-size", type=positive, default=256, help="number of sequences per step, over all ranks")
    add("--sequence-length", type=positive, default=4096, help="number of tokens per sequence")
    add("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16", help="dtype of the parameters")
    add(
        "--optimizer",
        choices=["adamw", "muon"],
        default="adamw",
        help="optimizer whose state and collectives are counted",
    )
    add("--dispatch", choices=get_args(Dispatch), default="auto", help="strategy for experts on other ranks")
    add("--num-chunks", type=positive, default=1, help="chunks of tokens: one is communicated, another is computed")
    add("--imbalance", type=float, default=1.0, help="least_loaded: rows of the most loaded rank over the mean")
    add("--schedule", choices=list(SCHEDULES), default="1f1b", help="schedule of pipeline stages")
    add("--num-micro-batches", type=positive, help="micro-batches of a step, for a mesh with an axis stage")
    add("--blocks-per-stage", type=positives, help="blocks of each stage, as 4,4,3; the default balances them")
    add("--stages-per-rank", type=positive, help="stages of each rank, if not those of the schedule")
    add("--recompute", default="", help="parts to recompute in the backward, as experts,attention")
    for size in SIZES:
        add(f"--{size.replace('_', '-')}", type=positive, help="replaces the published value")
    add_state_dtypes(add)
    add_plan(commands, positive)
    comparison = commands.add_parser(
        "compare_ranks",
        help="compare training on several ranks with one process",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    comparison.set_defaults(report=compare)
    comparison.add_argument("module", help="name of a module, importable from here, with the functions of the training")
    comparison.add_argument("--num-ranks", type=positive, default=2, help="number of ranks, processes on the CPU")
    comparison.add_argument("--timeout", type=positive, default=300, help="seconds for each start of processes")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Parse a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers."""
    return [positive(number) for number in text.split(",")]


def plan(options: argparse.Namespace) -> str:
    """Return the report of `explain`."""
    mesh = Mesh.planned(parse_mesh(options.mesh), world_size=options.world_size)
    rules = LogicalRules.load(options.rules)
    changes = {size: getattr(options, size) for size in SIZES if getattr(options, size) is not None}
    published_model = published(options.preset)
    recompute = tuple(name.strip() for name in options.recompute.split(",") if name.strip())
    sizes = {"max_sequence_length": options.sequence_length, "recompute": recompute, **changes}
    config = DecoderConfig.of_published(published_model, **sizes)
    model = Decoder(config, device="meta", dtype=getattr(torch, options.dtype))
    optimizer: Optimizer = options.optimizer
    step: dict[str, Any] = {
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "dispatch": options.dispatch,
        "num_chunks": options.num_chunks,
        "imbalance": options.imbalance,
        "allow_unused": options.allow_unused,
        "schedule": options.schedule,
        "num_micro_batches": options.num_micro_batches,
        "blocks_per_stage": options.blocks_per_stage,
        "stages_per_rank": options.stages_per_rank,
    }
    explanation = explain(model, mesh, rules, **step)
    costs = estimate(model, mesh, rules, optimizer=optimizer, state_dtypes=state_dtypes(options), **step)
    dense = f", {config.num_dense_layers} of them dense" if config.num_dense_layers else ""
    changed = "".join(f" Here {name}={value}." for name, value in changes.items())
    difference = f" Differs from the published model: {published_model.differs}." if published_model.differs else ""
    head = (
        f"{published_model.name}: a Decoder of {config.num_layers} layers{dense}, embedding and output projection."
        f"{difference}{changed}",
        f"{mesh.num_ranks} ranks: {options.mesh}. Rules: {options.rules}. A step: {options.batch_size} sequences of "
        f"{options.sequence_length} tokens.{f' Recomputed: {options.recompute}.' if recompute else ''}",
        f"The largest rank needs {readable_bytes(sum(costs.memory.values()))} of memory.",
    )
    width = terminal_width()
    opening = "\n".join(paragraph(line, width=width) for line in head)
    lines = [line.format(dtype=options.dtype) for line in CONVENTIONS]
    lines += [] if costs.pipeline is None else [STAGE_CONVENTION]
    conventions = "\n".join(paragraph(line, width=width or 120) for line in lines)
    return f"{opening}\n\n{explanation}\n\n{costs}\n\n{conventions}"


def compare(options: argparse.Namespace) -> RankComparison:
    """Return the report of `compare_ranks`."""
    try:
        module = importlib.import_module(options.module)
    except ModuleNotFoundError as error:
        if error.name and options.module.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r} to import from this folder") from None
        raise
    functions = {name: getattr(module, name, None) for name in TRAINING}
    missing = [name for name, function in functions.items() if function is None]
    if missing:
        raise ValueError(f"{options.module} must have the functions {', '.join(TRAINING)}, got no {', '.join(missing)}")
    step = getattr(module, "step", None)
    return compare_ranks(**functions, num_ranks=options.num_ranks, step=step, timeout=options.timeout)  # type: ignore[arg-type]


def describe(_options: argparse.Namespace) -> str:
    """Return the report of `info`: versions, build, instruction set in use, processor and threads."""
    packages = {"torch": str(torch.__version__)}  # its metadata may lack the variant, such as "+cu132"
    for package in ("maxmoe", "transformers", "safetensors"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    facts = {
        **packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "threads:wait": waiting_of_this_process(torch.get_num_threads()),
        "cuda": f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.version.cuda else "not in torch",
        **{f"core:{name}": fact for name, fact in build_info().items()},
    }
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {fact}" for name, fact in facts.items())


def _processor() -> str:
    """Return the model name of the processor, which `platform.processor` leaves empty on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 1 for ranks that differ, 2 for invalid options and failed ranks."""
    options = parse_options(arguments)
    try:
        report = options.report(options)
        print(report)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:
        if options.report is not compare:
            raise
        traceback.print_exc()  # 1 says that the ranks differ
        return 2
    return int(isinstance(report, RankComparison) and not report.equal)


if __name__ == "__main__":
    sys.exit(main())
