"""Plan a model on a mesh without a cluster, compare ranks with one process, convert adapters, describe an installation.

    python -m maxmoe plan --preset deepseek_v3 --world-size 2048 --device h100 --batch-size 4096
    python -m maxmoe explain --preset deepseek_v3 --rules shard-exp-on-fsdp --mesh fsdp=16,expert=16
    python -m maxmoe estimate my_models:build --rules ep-as-dp --mesh fsdp=2,expert=2 --batch-size 8
    python -m maxmoe compare_ranks my_training --num-ranks 4
    python -m maxmoe adapters trained --model Qwen3-30B-A3B --to vllm --out served
    python -m maxmoe info

`plan` searches for the fastest plans of a model that fit in memory.

`explain` prints the sharding of every parameter and the dispatch of tokens to experts, both with the reasons, the
memory per rank and the collectives per step; `estimate` the last two.

The model is what a function of yours returns, `module:function`, or a `maxmoe.models.Decoder` with the sizes of a
published one. It is made on the meta device: its parameters are not allocated.

`compare_ranks` compares a training step on several ranks with one process, see `maxmoe.testing.compare_ranks`. It takes
a module with the functions build_model, parallelize, make_batch and loss, and step if there is one. It exits with 0 if
loss, outputs and gradients are equal, with 1 if they differ, and with 2 if they cannot be compared.

`adapters` tells what the files of an adapter are: layout, ranks and scales, with the norm of every product of its
factors. With --to, it writes the adapter for PEFT, vLLM, SGLang or llama.cpp, and compares every product in float64.

`info` prints versions, build and processor, for bug reports, and how threads wait for each other.
"""

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence

from maxmoe.ranks.failures import RankError

# Modules of this package, each with functions `add_options` and one of the name of the command. What plans needs the
# compiled operators, what compares does not: the module of the chosen command alone is imported.
COMMANDS = {
    "plan": ("plan", "search for the fastest plans of a model on a number of ranks"),
    "explain": ("explain", "print the plan of a model"),
    "estimate": ("explain", "print its memory and communication"),
    "compare_ranks": ("compare_ranks", "compare training on several ranks with one process"),
    "adapters": ("adapters", "describe an adapter of experts, or write it for another program"),
    "info": ("info", "print versions, build and processor"),
}


# An argument in a message: the first word, which must be something, name=value, or a name of several words. In other
# places "rules" or "memory" are ordinary words.
ARGUMENT = re.compile(
    r"^(?P<first>[a-z]+)(?= must | needs | \()"
    r"|\b(?P<given>[a-z_]+)=(?P<value>'[^']*'|[\w.]+)"
    r"|\b(?P<words>[a-z]+(_[a-z]+)+)\b"
)
NOT_OPTIONS = ("command", "report", "model", "module")


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but no None, False or empty ones."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is False or action.default in (None, "")
        return action.help if says_nothing else super()._get_help_string(action)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; None for the arguments of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m maxmoe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (home, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=DefaultsFormatter)
        if name in arguments[:1]:
            module = importlib.import_module(f"maxmoe.cli.{home}")
            module.add_options(command)
            command.set_defaults(report=getattr(module, name))
    return parser.parse_args(arguments)


def with_options(message: str, options: argparse.Namespace) -> str:
    """Return a message of the library with options of the command in the place of its arguments."""

    def option(match: re.Match[str]) -> str:
        name = match["first"] or match["given"] or match["words"]
        if name not in vars(options) or name in NOT_OPTIONS:
            return match[0]
        value = (match["value"] or "").strip("'").removeprefix("True")
        return f"--{name.replace('_', '-')} {value}".strip()

    return ARGUMENT.sub(option, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 1 for ranks that differ, 2 for invalid options and failed ranks."""
    try:
        options = parse_options(arguments)
    except ImportError as error:
        if error.name != "maxmoe._C":
            raise
        print(f"error: {error}", file=sys.stderr)  # the command needs the C++ core
        return 2
    try:
        report = options.report(options)
        print(report, flush=True)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe: nothing more is written, also at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, RankError) as error:
        print(f"error: {with_options(str(error), options)}", file=sys.stderr)
        return 2
    except Exception:
        if options.command != "compare_ranks":
            raise
        traceback.print_exc()  # 1 says that the ranks differ
        return 2
    return int(options.command == "compare_ranks" and not report.equal)
