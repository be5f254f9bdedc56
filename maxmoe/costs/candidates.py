"""Meshes with rules for a number of ranks, and their memory and time by arithmetic on plans with two ranks per axis."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from torch import nn

from maxmoe.costs.device import Device
from maxmoe.costs.step import kinds_of_blocks
from maxmoe.costs.step_time import sending
from maxmoe.costs.stored import StateDtypes
from maxmoe.declaration import EXPERT_TOKEN_DIMS, declaration_of
from maxmoe.nn import MoELayer
from maxmoe.parallel.parallelize import types_that_may_mix_tokens
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
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
# With balanced routing, "least_loaded" is "ragged_all_to_all".
STRATEGIES: tuple[Dispatch, ...] = ("ragged_all_to_all", "ring_of_experts", "gather_weights")
MICRO_BATCHES = 8  # in each stage


class Candidate(NamedTuple):
    """A mesh with rules and a strategy; its stored bytes per rank and its time are least values."""

    rules: str
    sizes: tuple[tuple[str, int], ...]  # of the axes larger than one
    dispatch: Dispatch
    num_micro_batches: int
    stored: int
    seconds: float
    tokens: int  # of a micro-batch, on a rank


class Step(NamedTuple):
    """What a search asks for."""

    batch_size: int
    sequence_length: int
    device: Device
    state_dtypes: StateDtypes


class _Message(NamedTuple):
    """Collectives of all blocks with the same axes: each rank has the bytes of all ranks over those along `shards`."""

    kind: str
    axes: tuple[str, ...]
    shards: tuple[str, ...]
    is_repeated: bool = False  # for every micro-batch, with the same bytes
    is_weight: bool = True


_Costs: TypeAlias = tuple[Counter[tuple[str, ...]], Counter[_Message]]
COPIES = {"all-gather": lambda n: n - 1, "all-to-all": lambda n: 1 - 1 / n, "all-reduce": lambda n: 2 - 2 / n}


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`, each once."""
    if count == 0:
        yield from [()] if number == 1 else []
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *others) for others in factorisations(number // factor, count - 1))


class Candidates:
    """Meshes for a model. `cannot_run` counts those that are not tried, `refused` has errors of `parallelize`."""

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
        parameters = [each for each in model.parameters() if each.is_floating_point()]
        self._item = parameters[0].dtype.itemsize
        dtypes = step.state_dtypes.of_parameters(parameters[0].dtype)
        state = {name: dtype.itemsize * (2 if name == "moments" else 1) for name, dtype in dtypes.items()}
        self._state = sum(state.values()) / self._item
        on_one_rank = make_plan(model, Mesh.planned({}), LogicalRules(), allow_unused=True)
        self._undeclared = types_that_may_mix_tokens(on_one_rank)
        self._num_experts = [module.config.num_experts for module in model.modules() if isinstance(module, MoELayer)]
        self._costs: dict[Hashable, _Costs] = {}

    def of(self, world_size: int) -> tuple[list[Candidate], Counter[str], list[str]]:
        """Return the candidates in the order of their time, the numbers of others by the reason, and refusals."""
        found: dict[Hashable, Candidate] = {}
        others, refused = Counter[str](), list[str]()
        for name, rules in self._rules.items():
            known = dict.fromkeys(axis for _, axes in rules for axis in axes)
            axes = [axis for axis in known if axis not in (*ORDER, "fsdp_transpose")]
            axes += [axis for axis in ORDER if axis in known and (axis != STAGE_AXIS or self._num_blocks)]
            within = Mesh.planned({axis: 2 for axis in axes if axis != STAGE_AXIS})
            batch_axes, length_axes = token_sharding(within, rules).spec
            *_, expert_axes = activation_spec(EXPERT_TOKEN_DIMS, within, rules)
            for factors in factorisations(world_size, len(axes)):
                mesh = Mesh.planned({axis: size for axis, size in zip(axes, factors, strict=True) if size > 1})
                parts = [mesh.size(*axes) for axes in (batch_axes, length_axes, expert_axes)]
                if (reason := self._why_not(mesh, *parts)) is not None:
                    others[reason] += 1
                    continue
                # Rules that differ in absent axes only give the same plan.
                effective = dict.fromkeys((of, tuple(filter(mesh.sizes.__contains__, axes))) for of, axes in rules)
                same = frozenset(mesh.sizes.items()), tuple(sorted(effective, key=itemgetter(0)))
                for dispatch in STRATEGIES if parts[2] > 1 else ("auto",):
                    if (key := (*same, dispatch)) in found:
                        continue
                    try:
                        found[key] = self._candidate(name, mesh, dispatch, parts[0])
                    except ValueError as error:
                        refused.append(f"{mesh}, {name}, {dispatch}: {error}")
        # Of rules that shard other dims over the same axes, the first ones are tried.
        distinct: dict[Hashable, Candidate] = {}
        for each in found.values():
            distinct.setdefault(each._replace(rules=""), each)
        return sorted(distinct.values(), key=lambda each: each.seconds), others, refused

    def exact(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the memory and the time of its own plan, in which axes may not divide dims."""
        mesh = Mesh.planned(dict(candidate.sizes))
        costs = self._count(candidate.rules, mesh.within_stage(), candidate.dispatch)
        return self._arithmetic(candidate.rules, mesh, candidate.dispatch, candidate.num_micro_batches, costs)

    def _why_not(self, mesh: Mesh, batch_parts: int, length_parts: int, expert_parts: int) -> str | None:
        """Return why a mesh is not tried, or None."""
        batch_size, length, device, _ = self._step
        stages, per_node = mesh.size(STAGE_AXIS), device.ranks_per_node
        if stages > max(1, self._num_blocks):
            return "more stages than blocks"
        if batch_size % batch_parts:
            return f"batch_size ({batch_size}) is not divisible"
        if length % length_parts:
            return f"sequence_length ({length}) is not divisible"
        if length_parts > 1 and self._undeclared:
            return (
                f"sequences are sharded, and {', '.join(self._undeclared)} declare nothing: a module that mixes tokens "
                "would compute something else (needs_whole_sequences of maxmoe.parallel.Declaration)"
            )
        if batch_size // batch_parts < stages:
            return "fewer sequences on a rank than stages"
        if any(number % expert_parts for number in self._num_experts):
            return f"the number of experts ({min(self._num_experts)}) is not divisible"
        if per_node and any(mesh.size(axis) > per_node for axis in WITHIN_NODE):
            return f"{' or '.join(WITHIN_NODE)} above the ranks of a node ({per_node})"
        return None

    def _candidate(self, rules: str, mesh: Mesh, dispatch: Dispatch, batch_parts: int) -> Candidate:
        stages, rows = mesh.size(STAGE_AXIS), self._step.batch_size // batch_parts
        count = min(MICRO_BATCHES, rows // stages) * stages if stages > 1 else 1
        axes = mesh.within_stage().axes
        if (rules, axes, dispatch) not in self._costs:
            # The plan for two ranks along each axis, which shard what other numbers shard if they divide it.
            self._costs[rules, axes, dispatch] = self._count(rules, Mesh.planned(dict.fromkeys(axes, 2)), dispatch)
        return self._arithmetic(rules, mesh, dispatch, count, self._costs[rules, axes, dispatch])

    def _arithmetic(self, rules: str, mesh: Mesh, dispatch: Dispatch, count: int, costs: _Costs) -> Candidate:
        batch_size, length, device, _ = self._step
        (state, messages), stages = costs, mesh.size(STAGE_AXIS)
        stored = sum(size / mesh.size(*axes) for axes, size in state.items()) / stages
        compute, moved = self._compute / mesh.num_ranks, {True: 0.0, False: 0.0}
        for (kind, axes, shards, is_repeated, is_weight), size in messages.items():
            if (ranks := mesh.size(*axes)) > 1:
                num_bytes = size / mesh.size(*shards) / stages * COPIES[kind](ranks) * (count if is_repeated else 1)
                times = max(self._num_blocks, 1) / stages * (count if is_repeated or not is_weight else 1)
                moved[is_weight] += sending(kind, axes, times, num_bytes, mesh, device)
        busy = compute + moved[False] + moved[True] - device.overlap * min(moved[True], compute)
        tokens = batch_size * length * stages // (mesh.num_ranks * count)
        sizes = tuple(mesh.sizes.items())
        return Candidate(rules, sizes, dispatch, count, int(stored), busy * (count + stages - 1) / count, tokens)

    def _count(self, rules: str, mesh: Mesh, dispatch: Dispatch) -> _Costs:
        """Return the bytes of parameters and state by the axes that shard them, and the bytes of messages."""
        plan = make_plan(self._reduced, mesh, self._rules[rules], dispatch=dispatch, allow_unused=True)
        state, messages = Counter[tuple[str, ...]](), Counter[_Message]()
        for path, module in plan.items():
            blocks = self._blocks(path)
            parameters = module.parameters.values()
            for each in parameters:
                size = blocks * each.parameter.num_weights * each.parameter.dtype.itemsize
                stored, used = _axes(each.stored), _axes(each.used)
                gathered = tuple(axis for axis in stored if axis not in used)
                others = {*each.grad_used.partial, *each.grad_unsharded.partial}.difference(gathered)
                state[stored] += round(size * (1 + self._state * each.is_trained))
                # A forward and a backward gather a parameter; FSDP2 reduces its gradient after the last micro-batch.
                messages[_Message("all-gather", gathered, stored, is_repeated=True)] += 2 * size
                if each.is_trained:
                    is_repeated = each.fsdp_block is None
                    messages[_Message("all-gather", gathered, stored, is_repeated)] += size
                    messages[_Message("all-reduce", tuple(sorted(others)), stored, is_repeated)] += size
                if (each.parameter.names or ())[:1] == ("kv_heads",):  # keys and values of whole sequences
                    self._add(messages, plan, "all-gather", plan.tokens.length_axes, 2 * blocks * each.local_shape[0])
            if module.tensor_parallel_hooks is not None:  # outputs, and gradients of inputs
                axes = module.tensor_parallel_hooks.axes
                sizes = (
                    dict(zip(each.parameter.names or (), each.parameter.shape, strict=False)) for each in parameters
                )
                hidden_size = next((size["embed"] for size in sizes if "embed" in size), 0)
                self._add(messages, plan, "all-reduce", axes, 2 * blocks * hidden_size)
        for path, (_, layer) in plan.layers.items():
            size = 2 * self._blocks(path) * layer.config.row_size
            self._add(messages, plan, "all-reduce", layer.partial_axes, size)
            if layer.strategy == "ragged_all_to_all":
                self._add(messages, plan, "all-to-all", layer.token_axes, 2 * size * layer.config.top_k)
            elif layer.strategy == "ring_of_experts":
                self._add(messages, plan, "all-gather", layer.token_axes, 2 * size)
        return state, messages

    def _add(self, messages: Counter[_Message], plan: Plan, kind: str, axes: tuple[str, ...], elements: int) -> None:
        """Add messages that have a number of elements for each token."""
        num_bytes = self._step.batch_size * self._step.sequence_length * elements * self._item
        messages[_Message(kind, axes, plan.tokens.axes, is_weight=False)] += num_bytes

    def _blocks(self, path: str) -> int:
        """Return the number of blocks like the one that has a module; 1 outside of blocks."""
        return next((count for block, count in self._counts.items() if f"{path}.".startswith(block)), 1)


def _axes(sharding: NamedSharding) -> tuple[str, ...]:
    return tuple(axis for axes in sharding.spec for axis in axes)
