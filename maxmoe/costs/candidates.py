"""Meshes with rules for a number of ranks, and the least memory and time of their steps, by arithmetic on plans."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from maxmoe.costs.device import Device
from maxmoe.costs.step import kinds_of_blocks
from maxmoe.costs.step_time import sending
from maxmoe.costs.stored import StateDtypes
from maxmoe.declaration import EXPERT_TOKEN_DIMS, declaration_of
from maxmoe.nn import MoE
from maxmoe.parallel.parallelize import types_that_may_mix_tokens
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import ParameterPlan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.parallel.plan.sharded_tokens import activation_spec, token_sharding
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module
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


class _Message(NamedTuple):
    """Collectives over axes with parameters that are sharded over `shards`."""

    kind: str
    axes: Axes
    shards: Axes
    is_repeated: bool  # for every micro-batch


class _Plan(NamedTuple):
    """Bytes of a plan, over all ranks: of the state by the axes that shard it, of weights, and of each token."""

    state: Counter[Axes]
    weights: Counter[_Message]
    rows: Counter[tuple[str, Axes]]


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
            path = pipeline_parts(model).blocks
            every = tuple(name for name, _ in model.get_submodule(path).named_children())
            kinds = kinds_of_blocks(model, StagePart(every, True, True)).values()
            first = tuple(sorted((names[0] for names in kinds), key=int))
            self._reduced = stage_module(model, StagePart(first, True, True))
            self._counts = {f"{path}.{names[0]}.": len(names) for names in kinds}
        self._num_blocks = sum(self._counts.values())
        on_one_rank = make_plan(model, Mesh.planned({}), LogicalRules(), allow_unused=True)
        self.undeclared = types_that_may_mix_tokens(on_one_rank)
        self._item = next(each.dtype.itemsize for each in model.parameters() if each.is_floating_point())
        configs = [module.config for module in model.modules() if isinstance(module, MoE)]
        self._num_experts = {config.num_experts for config in configs}
        self._hidden_size = max((config.hidden_size for config in configs), default=0)
        self._top_k = max((config.top_k for config in configs), default=1)
        self._plans: dict[tuple[LogicalRules, Axes, Dispatch], _Plan] = {}
        self.refused = ""

    def of(self, world_size: int) -> list[Candidate]:
        """Return the meshes that divide tokens and experts, the fastest first; of equal ones, that of the first rules."""
        found: dict[tuple[float, int, tuple[tuple[str, int], ...]], Candidate] = {}
        for name, rules in self._rules.items():
            known = dict.fromkeys(axis for _, axes in rules for axis in axes)
            axes = [axis for axis in known if axis not in (*ORDER, "fsdp_transpose")]
            axes += [axis for axis in ORDER if axis in known and (axis != STAGE_AXIS or self._num_blocks)]
            for factors in factorisations(world_size, len(axes)):
                mesh = Mesh.planned({axis: size for axis, size in zip(axes, factors, strict=True) if size > 1})
                for dispatch in self._dispatches(mesh, rules):
                    try:
                        each = self._candidate(name, mesh, dispatch)
                    except ValueError as error:
                        self.refused = f"{mesh}, {name}: {error}"
                    else:
                        found.setdefault(each[:3], each)
        return sorted(found.values())

    def _dispatches(self, mesh: Mesh, rules: LogicalRules) -> Iterable[Dispatch]:
        """Return the strategies for a mesh; none if tokens, experts or blocks cannot be divided among the ranks."""
        batch_axes, length_axes = token_sharding(mesh, rules).spec
        *_, expert_axes = activation_spec(EXPERT_TOKEN_DIMS, mesh, rules)
        stages, length_parts, expert_parts = (mesh.size(*axes) for axes in ((STAGE_AXIS,), length_axes, expert_axes))
        rows, rest = divmod(self._step.batch_size, mesh.size(*batch_axes))
        per_node = self._step.device.ranks_per_node or mesh.num_ranks
        is_divided = (
            not rest
            and stages <= min(rows, max(1, self._num_blocks))
            and not self._step.sequence_length % length_parts
            and not (length_parts > 1 and self.undeclared)
            and not any(number % expert_parts for number in self._num_experts)
            and all(mesh.size(axis) <= per_node for axis in WITHIN_NODE)
        )
        return () if not is_divided else STRATEGIES if expert_parts > 1 else ("auto",)

    def _candidate(self, name: str, mesh: Mesh, dispatch: Dispatch) -> Candidate:
        (batch_size, length, device, _), stages = self._step, mesh.size(STAGE_AXIS)
        batch_axes, length_axes = token_sharding(mesh, self._rules[name]).spec
        rows, tokens = batch_size // mesh.size(*batch_axes), batch_size * length // mesh.size(*batch_axes, *length_axes)
        count = min(MICRO_BATCHES, rows // stages) * stages if stages > 1 else 1
        plan, blocks = self._plan(self._rules[name], mesh.within_stage().axes, dispatch), max(self._num_blocks, 1)
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
        times = {"all-gather": num_ranks, "all-reduce": 2, "all-to-all": self._top_k}
        return times[kind] * (1 - 1 / num_ranks) if num_ranks > 1 else 0.0

    def _plan(self, rules: LogicalRules, axes: Axes, dispatch: Dispatch) -> _Plan:
        """Count with two ranks along each axis, which shard what other numbers of ranks shard if they divide it."""
        # Rules that differ in absent axes only give the same plan.
        rules = LogicalRules((of, tuple(filter(axes.__contains__, names))) for of, names in rules)
        if (key := (rules, axes, dispatch)) not in self._plans:
            counted = _Plan(Counter(), Counter(), Counter())
            plan = make_plan(
                self._reduced, Mesh.planned(dict.fromkeys(axes, 2)), rules, dispatch=dispatch, allow_unused=True
            )
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
            self._plans[key] = counted
        return self._plans[key]

    def _add(self, counted: _Plan, each: ParameterPlan, blocks: int) -> None:
        """Add the state of a parameter of some blocks, and the messages of a step with its weights and gradients."""
        own, is_repeated = each.parameter.dtype, each.fsdp_block is None
        num_weights, stored, used = blocks * each.parameter.num_weights, _axes(each.stored), _axes(each.used)
        gathered = tuple(axis for axis in stored if axis not in used)
        summed = tuple(sorted({*each.grad_used.partial, *each.grad_unsharded.partial}.difference(gathered)))
        dtypes = self._step.state_dtypes.of_parameters(own).items() if each.is_trained else ()
        widths = [dtype.itemsize * (2 if name == "moments" else 1) for name, dtype in dtypes]
        counted.state[stored] += num_weights * sum(widths, own.itemsize)
        # The forward and the backward gather a parameter; FSDP2 reduces its gradient after the last micro-batch.
        counted.weights[_Message("all-gather", gathered, stored, True)] += 2 * num_weights * own.itemsize
        if each.is_trained:
            counted.weights[_Message("all-gather", gathered, stored, is_repeated)] += num_weights * own.itemsize
            counted.weights[_Message("all-reduce", summed, stored, is_repeated)] += num_weights * own.itemsize


def _axes(sharding: NamedSharding) -> Axes:
    return tuple(axis for axes in sharding.spec for axis in axes)
