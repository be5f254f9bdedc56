"""A step of a model, or of one of its stages, measured on a fake rank with up to three blocks of each kind."""

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe._torch import reshaped, tree_leaves
from maxmoe._torch.copies import copy_modules, replace_tensors
from maxmoe.costs.fake_rank import allocate, fake_rank
from maxmoe.costs.measured import Measured, measuring
from maxmoe.declaration import declaration_of
from maxmoe.expert_load import StatsAccumulator
from maxmoe.nn import MoELayer
from maxmoe.nn.training_watch import TrainingWatch
from maxmoe.optim.muon import Muon
from maxmoe.optim.parameter_groups import parameter_groups
from maxmoe.parallel.apply.apply import apply_plan
from maxmoe.parallel.apply.fsdp import fully_shard_stage
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules

Arguments: TypeAlias = tuple[Any, ...] | dict[str, Any]
# Function of the numbers of sequences and of tokens of each: positional arguments of the model, or keywords.
Inputs: TypeAlias = Callable[[int, int], Arguments]
# Function of the output of the model that returns the loss of a step.
Loss: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step runs.

    Args:
        sizes: number of ranks along each axis of the mesh within a stage.
        tokens: numbers of sequences of a rank, and of tokens of each.
        inputs: arguments of the model; None for token ids or hidden states.
        loss: loss of the output; None for `default_loss`.
        hot_share: share of the slots that choose the first expert; the others are distributed equally.
        hidden_states: shape and dtype of what a stage gets from the stage before.
        splits_backward: whether a schedule computes gradients of inputs and of weights at different times; None for a
            model without stages.
    """

    sizes: dict[str, int]
    rules: LogicalRules
    dispatch: Dispatch
    num_chunks: int
    tokens: tuple[int, int]
    inputs: Inputs | None = None
    loss: Loss | None = None
    hot_share: float = 0.0
    hidden_states: Tensor | None = None
    splits_backward: bool | None = None


def measure_step(model: nn.Module, part: StagePart | None, options: StepOptions) -> Measured:
    """Measure a forward and a backward of a model or of a stage, with gradients that are there already.

    Of each kind of blocks, up to three run: every further one costs what the second of the three does.
    """
    if declaration_of(model).pipeline_parts is None:
        return _measure(model, options, ())[""]
    path, (shortened, kinds) = pipeline_parts(model).blocks, with_few_blocks(model, part, 3)
    chosen = [name for names in kinds for name in names[:3]]
    found = _measure(shortened, options, [f"{path}.{name}" for name in chosen])
    of_block = {name: found[f"{path}.{name if name in chosen else names[1]}"] for names in kinds for name in names}
    total = Measured()
    total.add(found[""])
    for measured in of_block.values():
        total.add(measured)

    def saved_before(name: str, blocks: Iterable[str]) -> int:
        return sum(of_block[other].saved for other in blocks if int(other) < int(name))

    # While a block runs, the blocks before it hold what they have saved: most if it is the last one of its kind. While
    # none runs, all blocks may.
    last = {name: max(names, key=int) for names in kinds for name in names}
    not_run = sum(each.saved for each in of_block.values()) - sum(of_block[name].saved for name in chosen)
    peaks = (of_block[name].peak + saved_before(last[name], of_block) - saved_before(name, chosen) for name in chosen)
    total.peak = max([found[""].peak + not_run, *peaks])
    return total


def with_few_blocks(model: nn.Module, part: StagePart | None, most: int) -> tuple[nn.Module, list[list[str]]]:
    """Return a model, or a stage, with `most` blocks of each kind, and the names of all blocks of each kind."""
    indices = range(len(model.get_submodule(pipeline_parts(model).blocks)))  # type: ignore[arg-type]
    part = part or StagePart(tuple(map(str, indices)), is_first=True, is_last=True)
    kinds = [*kinds_of_blocks(model, part).values()]
    chosen = sorted((name for names in kinds for name in names[:most]), key=int)
    return stage_module(model, part._replace(blocks=tuple(chosen))), kinds


def part_kind(model: nn.Module, part: StagePart) -> Hashable:
    """Return what two stages have in common if a step costs the same in both."""
    counts = frozenset((signature, len(names)) for signature, names in kinds_of_blocks(model, part).items())
    return counts, part.is_first, part.is_last


def kinds_of_blocks(model: nn.Module, part: StagePart) -> dict[Hashable, list[str]]:
    """Group the names of the blocks of a stage that cost the same."""
    blocks, kinds = pipeline_parts(model).blocks, dict[Hashable, list[str]]()
    for name in part.blocks:
        kinds.setdefault(_signature(model.get_submodule(f"{blocks}.{name}")), []).append(name)
    return kinds


def _signature(block: nn.Module) -> Hashable:
    """Return what two blocks have in common if a step costs the same in both."""
    modules = tuple((path, type(module), module.extra_repr()) for path, module in block.named_modules())
    configs = tuple(repr(getattr(module, "config", None)) for module in block.modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return modules, configs, parameters


def _measure(module: nn.Module, options: StepOptions, blocks: Sequence[str]) -> Mapping[str, Measured]:
    """Measure a step; raise the error of the most likely inputs if the module takes none of those that are tried."""
    first: Exception | None = None
    for make in _inputs(module, options):
        model = _on_meta(module)
        try:
            return _measure_with(model, make, options, blocks)
        except Exception as error:
            first = first or _readable(model, error)
    assert first is not None
    raise first


def _measure_with(
    model: nn.Module, make_inputs: Inputs, options: StepOptions, blocks: Sequence[str]
) -> Mapping[str, Measured]:
    with warnings.catch_warnings(), _on_fake_rank(model, options) as (mesh, called):
        warnings.simplefilter("ignore")  # such as FSDP2's, which a real step repeats
        inputs = _checked_inputs(make_inputs(*options.tokens))
        positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        with measuring(mesh, model) as recorder:
            for path in blocks:
                recorder.watch(path, model.get_submodule(path))
            output = called(*positional, **named)
            loss = (options.loss or default_loss)(output)
            recorder.end_forward()
            loss.backward()  # type: ignore[no-untyped-call]
    return recorder.parts


def measure_muon(model: nn.Module, options: StepOptions) -> Measured:
    """Measure the step of `maxmoe.optim.Muon` for the matrices of a whole model or stage."""
    model = _on_meta(model)
    with _on_fake_rank(model, options) as (mesh, _):
        groups = [group for group in parameter_groups(model) if group["algorithm"] == "muon"]
        with measuring(mesh, model) as recorder:
            recorder.end_forward()
            Muon(groups).step()
    return recorder.parts[""]


@contextmanager
def _on_fake_rank(model: nn.Module, options: StepOptions) -> Iterator[tuple[Mesh, nn.Module]]:
    """Parallelize a model on the meta device in the context of a fake rank; yields the mesh, and the module to call.

    Without the checks of `maxmoe.parallelize`, whose plan has been made before, and which compare ranks.
    """
    with fake_rank(options.sizes, options.hot_share) as (mesh, fake_tensors):
        has_stages = options.splits_backward is not None
        plan = make_plan(
            model,
            mesh,
            options.rules,
            dispatch=options.dispatch,
            num_chunks=options.num_chunks,
            allow_unused=True,
            splits_backward=bool(options.splits_backward),
        )
        apply_plan(model, plan, options.num_chunks, input_check=None)
        stage = nn.Sequential(model)
        if has_stages:
            fully_shard_stage(stage, model, plan, reshards=not options.splits_backward)
        with fake_tensors:
            allocate(model)
            if any(isinstance(each, MoELayer) and each.config.load_balance_scope == "step" for each in model.modules()):
                StatsAccumulator(model)  # which such layers need; the model's own observes real calls
            yield mesh, stage if has_stages else model


def default_loss(output: Any) -> Tensor:
    """Return the mean cross-entropy of the `logits` of an output with its `aux_loss`, or the sum of another output."""
    logits, aux_loss = getattr(output, "logits", None), getattr(output, "aux_loss", None)
    if isinstance(logits, Tensor):
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        loss = F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))
        return loss + aux_loss if isinstance(aux_loss, Tensor) else loss
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("no output of the model requires a gradient: nothing is trained")
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


def _inputs(model: nn.Module, options: StepOptions) -> Iterator[Inputs]:
    """Yield functions that make arguments with which a model may be called, the most likely ones first."""
    like = options.hidden_states
    if like is not None:
        # Not a leaf, so that a block may modify the hidden states in place.
        empty = partial(torch.empty, like.shape, dtype=like.dtype, requires_grad=True)
        yield lambda *_: (reshaped(empty(), tuple(like.shape)),)
    elif options.inputs is not None:
        yield options.inputs
    else:
        yield from _likely_inputs(model)


def _likely_inputs(model: nn.Module) -> list[Inputs]:
    """Return functions that make token ids and hidden states, for all arguments that the forward requires."""
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    arguments = inspect.signature(model.forward).parameters.values()
    required = [each for each in arguments if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    count, dtype = max(len(required), 1), parameters[0].dtype if parameters else torch.get_default_dtype()

    def ids(*tokens: int) -> Arguments:
        return (torch.zeros(tokens, dtype=torch.int64),) * count

    def hidden_states(size: int, *tokens: int) -> Arguments:
        return (torch.empty(*tokens, size, dtype=dtype),) * count

    sizes = dict.fromkeys(parameter.shape[-1] for parameter in parameters if parameter.dim())
    of_sizes: list[Inputs] = [partial(hidden_states, size) for size in sizes]
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return [ids, *of_sizes] if isinstance(next(owners, None), nn.Embedding) else [*of_sizes, ids]


def _checked_inputs(inputs: Arguments) -> Arguments:
    if not isinstance(inputs, tuple | dict):
        raise TypeError(f"inputs must return a tuple or a dict of arguments, got {type(inputs).__name__}")
    return inputs


def _on_meta(module: nn.Module) -> nn.Module:
    """Copy a module in train mode; the copies of its tensors are on the meta device, and nothing observes it."""
    copied = copy_modules(module).train()
    replace_tensors(copied, partial(torch.empty_like, device="meta"))
    for each in copied.modules():
        if isinstance(each, MoELayer):
            each.metrics_accumulator, each.training_watch = None, TrainingWatch()
    return copied


def _readable(model: nn.Module, error: Exception) -> Exception:
    """Return a ValueError that names the innermost module in which a step has failed, and what it ran."""
    paths = {id(module): path for path, module in model.named_modules()}
    running = [frame for frame in _locals(error.__traceback__) if id(frame.get("self")) in paths]
    where = "its inputs or its loss" if not running else paths[id(running[-1]["self"])] or "the model"
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ValueError(
        f"a step of {type(model).__name__} cannot be measured without values, because of {where}: {reason}. If the "
        "model takes other inputs, give `inputs`; if a value decides a shape or a branch, it must be an integer that "
        "does not depend on floating-point values"
    )


def _locals(traceback: TracebackType | None) -> Iterator[dict[str, Any]]:
    while traceback is not None:
        yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next
