"""The commands `explain` and `estimate`: what a plan of a model stores, sends and saves."""

import argparse
from typing import Any, get_args

from maxmoe import costs
from maxmoe.cli.model import add_model, add_state_dtypes, chosen_model, state_dtypes
from maxmoe.cli.values import positive, positives
from maxmoe.costs.estimate import Optimizer
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.sharding.mesh import Mesh, parse_mesh
from maxmoe.sharding.rules import LogicalRules, preset_names
from maxmoe.text_table import readable_bytes, report

PLAN = ("dispatch", "num_chunks", "allow_unused")
STAGES = ("schedule", "num_micro_batches", "blocks_per_stage", "stages_per_rank")
STEP = ("batch_size", "sequence_length", "optimizer", "imbalance")
CONVENTIONS = (
    "One rank runs a forward and a backward of the model without values: what it stores, saves, sends and computes is "
    "counted. Parameters are {dtypes}. Activations: what autograd saves. Temporary: what else is in memory when it is "
    "fullest, as gathered parameters, their gradients, recomputed activations and results of operators. Work space of "
    "operators and the gradient norm are not counted.\n"
    "Bytes that each of n ranks in a ring sends, and receives: (n - 1) / n of the whole tensor for all-gather and "
    "reduce-scatter, twice that for all-reduce; axes joined by a comma are one ring. All-to-all: rows of other ranks, "
    "with equally many rows per expert unless --imbalance says otherwise."
)
STAGE_CONVENTION = (
    "Pipeline stages: bytes of one rank. Work: multiplications per token with weights, relative to the mean "
    "of the stages. In flight: the most micro-batches whose forward has run and whose backward has not. Activations: "
    "of the micro-batches in flight. Sent: hidden states and their gradients, to the ranks of other stages in a step."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of the model, its mesh and its step."""
    add = command.add_argument
    add_model(add)
    add("--rules", default="default", help=f"a preset of rules, or a YAML file: {', '.join(preset_names())}")
    add("--allow-unused", action="store_true", help="accept axes and names of rules that have no effect")
    add("--mesh", required=True, help="axes and sizes, as fsdp=16,expert=16; one may be -1 with --world-size")
    add("--world-size", type=positive, help="number of ranks, if not the product of the sizes")
    add("--batch-size", type=positive, default=256, help="number of sequences per step, over all ranks")
    add("--sequence-length", type=positive, default=4096, help="number of tokens per sequence")
    optimizers = get_args(Optimizer)
    add("--optimizer", choices=optimizers, default="adamw", help="optimizer whose state and collectives are counted")
    add("--dispatch", choices=get_args(Dispatch), default="auto", help="strategy for experts on other ranks")
    add("--num-chunks", type=positive, default=1, help="chunks of tokens: one is communicated, another is computed")
    add("--imbalance", type=float, default=1.0, help="rows of the most loaded rank over the mean")
    add("--schedule", choices=list(SCHEDULES), default="1f1b", help="schedule of pipeline stages")
    add("--num-micro-batches", type=positive, help="micro-batches of a step, for a mesh with an axis stage")
    add("--blocks-per-stage", type=positives, help="blocks of each stage, as 4,4,3; the default balances them")
    add("--stages-per-rank", type=positive, help="stages of each rank (default: as the schedule has)")
    add("--recompute", default="", help="parts to recompute in the backward, as experts,attention")
    add_state_dtypes(add)


def explain(options: argparse.Namespace) -> str:
    """Return the sharding of every parameter, the dispatch of every layer, and the report of `estimate`."""
    return _report(options, with_explanation=True)


def estimate(options: argparse.Namespace) -> str:
    """Return the memory per rank and the collectives per step."""
    return _report(options, with_explanation=False)


def _report(options: argparse.Namespace, *, with_explanation: bool) -> str:
    mesh = Mesh.planned(parse_mesh(options.mesh), world_size=options.world_size)
    rules = LogicalRules.load(options.rules)
    recompute = tuple(name.strip() for name in options.recompute.split(",") if name.strip())
    text, model = chosen_model(options, recompute, max_sequence_length=options.sequence_length)
    plan: dict[str, Any] = {name: getattr(options, name) for name in (*PLAN, *STAGES)}
    step: dict[str, Any] = {name: getattr(options, name) for name in STEP}
    explanation = str(costs.explain(model, mesh, rules, **plan)) if with_explanation else ""
    estimated = costs.estimate(model, mesh, rules, state_dtypes=state_dtypes(options), **plan, **step)
    head = (
        text,
        f"{mesh.num_ranks} ranks: {options.mesh}. Rules: {options.rules}. A step: {options.batch_size} sequences of "
        f"{options.sequence_length} tokens.{f' Recomputed: {options.recompute}.' if recompute else ''}",
        f"The largest rank needs {readable_bytes(sum(estimated.memory.values()))} of memory.",
    )
    own = next(model.parameters()).dtype
    stored = [f"{name} {dtype}" for name, dtype in state_dtypes(options).of_parameters(own).items()]
    dtypes = ", ".join([str(own), *stored]).replace("torch.", "")
    conventions = [CONVENTIONS.format(dtypes=dtypes), *([STAGE_CONVENTION] if len(estimated.ranks) > 1 else [])]
    texts = (report(["\n".join(head)]), explanation, str(estimated), report(["\n".join(conventions)]))
    return "\n\n".join(filter(None, texts))
