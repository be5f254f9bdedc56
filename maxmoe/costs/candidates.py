"""Meshes with rules for a number of ranks, and the least memory and time of their steps, by arithmetic on plans."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from torch import nn

from maxmoe.costs.device import Device
from maxmoe.costs.step import with_few_blocks
from maxmoe.costs.step_time import sending
from maxmoe.costs.stored import StateDtypes
from maxmoe.declaration import EXPERT_TOKEN_DIMS, declaration_of
from maxmoe.nn import MoELayer
from maxmoe.parallel.parallelize import types_that_may_mix_tokens
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import ParameterPlan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.parallel.plan.sharded_tokens import activation_spec, token_sharding
from maxmoe.pipelining.stage_modules import pipeline_parts
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules

# From the axis with the fewest bytes to the one with the most, so that the last ones are within a node. Other axes come
# first. `fsdp_transpose` shards the same weights as `fsdp`, along another dim, and is not tried.
ORDER = (STAGE_AXIS, "data", "fsdp", "context", "expert", "tensor")
WITHIN_NODE = ("context", "tensor")  # axes that are tried up to the number of ranks of a node
# Collectives of the rows of experts. With balanced routing, "least_loaded" is "ragged_all_to_all".
STRATEGIES: dict[Dispatch, str] = {
    "ragged_all_to_all": "all-to-all",
    "ring_of_experts": "all-gather",
    "gather_weights": "all-gather",
}
MICRO_BATCHES = 8  # in each stage

Axes = tuple[str, ...]


class Step(NamedTuple):
    """What a search asks for."""

    batch_size: int
    sequence_length: int
    device: Device
    state_dtypes: StateDtypes


class Candidate(NamedTuple):
    """A mesh with rules and a strategy. Candidates are ordered by their time."""

    seconds: float  # of a step, at least
    stored: int  # bytes of parameters, gradients and optimizer state, at least
    sizes: tuple[tuple[str, int], ...]  # of the axes larger than one
    dispatch: Dispatch
    rules: str
    num_micro_batches: int
    tokens: int  # of a micro-batch, on a rank


class _Layout(NamedTuple):
    """What all meshes with the same axes and rules have in common."""

    rules: LogicalRules  # with these axes only: rules that differ in others give the same plan
    within_stage: Axes
    batch_axes: Axes
    length_axes: Axes
    expert_axes: Axes


class _Plan(NamedTuple):
    """What arithmetic needs of a plan, over all ranks."""

    state: Counter[Axes]  # bytes of parameters, gradients and optimizer state by the axes that shard them
    # Bytes of collectives by their kind, axes, the axes that shard them, and whether each micro-batch has them.
    weights: Counter[tuple[str, Axes, Axes, bool]]
    rows: Counter[tuple[str, Axes]]  # bytes of collectives for each token of a rank


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`, each once."""
    if count == 0:
        yield from [()] if number == 1 else []
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *others) for others in factorisations(number // factor, count - 1))


class Candidates:
    """Meshes for a model; `compute` are the seconds of a step on one rank. `refused` is an error of `parallelize`."""

    def __init__(self, model: nn.Module, rules: Sequence[str], step: Step, compute: float) -> None:
        self._step, self._compute, self._reduced = step, compute, model
        self._rules = {name: LogicalRules.load(name) for name in rules}
        self._counts: dict[str, int] = {}  # number of blocks like the one with a path
        if declaration_of(model).pipeline_parts is not None:
            self._reduced, kinds = with_few_blocks(model, None, 1)
            self._counts = {f"{pipeline_parts(model).blocks}.{names[0]}.": len(names) for names in kinds}
        self._num_blocks = sum(self._counts.values())
        on_one_rank = make_plan(model, Mesh.planned({}), LogicalRules(), allow_unused=True)
        self.undeclared = types_that_may_mix_tokens(on_one_rank)
        self._item = next(each.dtype.itemsize for each in model.parameters() if each.is_floating_point())
        configs = [module.config for module in model.modules() if isinstance(module, MoELayer)]
        self._num_experts = {config.num_experts for config in configs}
        self._hidden_size = max((config.hidden_size for config in configs), default=0)
        self._top_k = max((config.top_k for config in configs), default=1)
        self._layout_of, self._plan_of = cache(self._layout), cache(self._plan)
        self.refused = ""

    def of(self, world_size: int) -> list[Candidate]:
        """Return the meshes that divide tokens and experts in the order of their time; of equal ones, the first one."""
        found: dict[tuple[float, int, tuple[tuple[str, int], ...]], Candidate] = {}
        for name, rules in self._rules.items():
            known = dict.fromkeys(axis for _, axes in rules for axis in axes)
            axes = [axis for axis in known if axis not in (*ORDER, "fsdp_transpose")]
            axes += [axis for axis in ORDER if axis in known and (axis != STAGE_AXIS or self._num_blocks)]
            for factors in factorisations(world_size, len(axes)):
                mesh = Mesh.planned({axis: size for axis, size in zip(axes, factors, strict=True) if size > 1})
                layout = self._layout_of(name, mesh.axes)
                for dispatch in self._dispatches(mesh, layout):
                    if (plan := self._plan_of(layout.rules, layout.within_stage, dispatch)) is not None:
                        each = self._candidate(name, mesh, layout, dispatch, plan)
                        found.setdefault(each[:3], each)
        return sorted(found.values())

    def _layout(self, name: str, axes: Axes) -> _Layout:
        within = Mesh.planned({axis: 2 for axis in axes if axis != STAGE_AXIS})
        of_mesh = ((of, tuple(filter(within.axes.__contains__, names))) for of, names in self._rules[name])
        rules = LogicalRules(of_mesh)
        batch_axes, length_axes = token_sharding(within, rules).spec
        *_, expert_axes = activation_spec(EXPERT_TOKEN_DIMS, within, rules)
        return _Layout(rules, within.axes, batch_axes, length_axes, expert_axes)

    def _dispatches(self, mesh: Mesh, layout: _Layout) -> Iterable[Dispatch]:
        """Return the strategies for a mesh; none if tokens, experts or blocks cannot be divided among the ranks."""
        length_parts, expert_parts = mesh.size(*layout.length_axes), mesh.size(*layout.expert_axes)
        rows, rest = divmod(self._step.batch_size, mesh.size(*layout.batch_axes))
        per_node = self._step.device.ranks_per_node or mesh.num_ranks
        is_divided = (
            not rest
            and mesh.size(STAGE_AXIS) <= min(rows, max(1, self._num_blocks))
            and not self._step.sequence_length % length_parts
            and not (length_parts > 1 and self.undeclared)
            and not any(number % expert_parts for number in self._num_experts)
            and all(mesh.size(axis) <= per_node for axis in WITHIN_NODE)
        )
        return () if not is_divided else STRATEGIES if expert_parts > 1 else ("auto",)

    def _candidate(self, name: str, mesh: Mesh, layout: _Layout, dispatch: Dispatch, plan: _Plan) -> Candidate:
        (batch_size, length, device, _), stages = self._step, mesh.size(STAGE_AXIS)
        rows = batch_size // mesh.size(*layout.batch_axes)
        tokens = rows * length // mesh.size(*layout.length_axes)
        count = min(MICRO_BATCHES, rows // stages) * stages if stages > 1 else 1
        blocks = max(self._num_blocks, 1)
        stored = sum(size / mesh.size(*axes) for axes, size in plan.state.items())
        compute, weights, others = self._compute / mesh.num_ranks, 0.0, 0.0
        for (kind, axes, shards, is_repeated), size in plan.weights.items():
            times = count if is_repeated else 1
            sent = size / mesh.size(*shards) * self._copies(kind, mesh.size(*axes))
            weights += sending(kind, axes, times * blocks / stages, times * sent / stages, mesh, device)
        for (kind, axes), size in plan.rows.items():
            sent = size * tokens * self._copies(kind, mesh.size(*axes))
            others += sending(kind, axes, count * blocks / stages, sent / stages, mesh, device)
        busy = compute + weights + others - device.overlap * min(weights, compute)
        return Candidate(
            seconds=busy * (count + stages - 1) / count,
            stored=int(stored / stages),
            sizes=tuple(mesh.sizes.items()),
            dispatch=dispatch,
            rules=name,
            num_micro_batches=count,
            tokens=batch_size * length * stages // (mesh.num_ranks * count),
        )

    def _copies(self, kind: str, num_ranks: int) -> float:
        """Return how often a rank sends its part of a message."""
        times = {"all-gather": num_ranks, "reduce-scatter": num_ranks, "all-reduce": 2, "all-to-all": self._top_k}
        return times[kind] * (1 - 1 / num_ranks) if num_ranks > 1 else 0.0

    def _plan(self, rules: LogicalRules, axes: Axes, dispatch: Dispatch) -> _Plan | None:
        """Count with two ranks along each axis, which shard what other numbers of ranks shard if they divide it."""
        counted, mesh = _Plan(Counter(), Counter(), Counter()), Mesh.planned(dict.fromkeys(axes, 2))
        try:
            plan = make_plan(self._reduced, mesh, rules, dispatch=dispatch, allow_unused=True)
        except ValueError as error:
            self.refused = str(error)
            return None
        for path, module in plan.items():
            blocks = next((count for block, count in self._counts.items() if f"{path}.".startswith(block)), 1)
            item, hooks, layer = blocks * self._item, module.tensor_parallel_hooks, plan.layers.get(path)
            for each in module.parameters.values():
                self._add(counted, each, blocks)
                if (each.parameter.names or ())[:1] == ("kv_heads",):  # keys and values of whole sequences
                    counted.rows["all-gather", plan.tokens.length_axes] += 2 * item * each.local_shape[0]
            # Outputs, and gradients of inputs, are summed over the ranks that compute parts of them.
            for partial in (() if hooks is None else hooks.axes, () if layer is None else layer[1].partial_axes):
                counted.rows["all-reduce", partial] += 2 * item * self._hidden_size
            if layer is not None and dispatch in STRATEGIES:  # to experts and back, and the gradients
                counted.rows[STRATEGIES[dispatch], layer[1].token_axes] += 4 * item * layer[1].config.row_size
        return counted

    def _add(self, counted: _Plan, each: ParameterPlan, blocks: int) -> None:
        """Add the state of a parameter of some blocks, and the collectives of a micro-batch with it."""
        own, stored, used = each.parameter.dtype, _axes(each.stored), _axes(each.used)
        num_weights = blocks * each.parameter.num_weights
        dtypes = self._step.state_dtypes.of_parameters(own).items() if each.is_trained else ()
        widths = [dtype.itemsize * (2 if name == "moments" else 1) for name, dtype in dtypes]
        counted.state[stored] += num_weights * sum(widths, own.itemsize)
        gathered = tuple(axis for axis in stored if axis not in used)
        summed = tuple(sorted({*each.grad_used.partial, *each.grad_unsharded.partial}.difference(gathered)))
        # Gathered in the forward and in the backward; the gradient is reduced, by FSDP2 after the last micro-batch.
        for kind, axes, times in (
            ("all-gather", gathered, 2),
            ("reduce-scatter", gathered, 1),
            ("all-reduce", summed, 1),
        ):
            is_repeated = kind == "all-gather" or each.fsdp_block is None
            counted.weights[kind, axes, stored, is_repeated] += times * num_weights * own.itemsize


def _axes(sharding: NamedSharding) -> Axes:
    return tuple(axis for axes in sharding.spec for axis in axes)
