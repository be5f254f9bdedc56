"""Makes the plan of `parallelize` from the declarations of the modules, the mesh and the rules.

Ranks along an axis hold the same tokens unless the axis shards the tokens. Only ranks with the same tokens may compute
partial outputs, which are summed. An axis that the rules map to the tokens and to another dim shards the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from maxmoe.adapters import wrappers_of
from maxmoe.checks.fields import check_int
from maxmoe.declaration import EXPERT_TOKEN_DIMS, TOKEN_DIMS, Absent, declaration_of
from maxmoe.nn import MoELayer, SharedExperts
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch, DispatchPlan, plan_dispatch
from maxmoe.parallel.plan.fsdp_units import blocks, fsdp_axes, fsdp_units, is_saved, shared_by_blocks
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding, shardings_by_name, tensor_parallel_activation
from maxmoe.parallel.plan.plan import ModulePlan, ParameterPlan, Plan, enclosing
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens, activation_spec, token_sharding
from maxmoe.parallel.plan.tensor_parallel_hooks import ResidualReaderHook, TensorParallelHooks
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec
from maxmoe.sharding.rules import LogicalRules, resolve


class ResidualPart(NamedTuple):
    """Reader and writer of a residual stream that is sharded along the hidden dim; see `ResidualStream`.

    Args:
        axes: mesh axes that shard the stream.
        reader: path of the module that reads the stream; None where the stream begins.
        writer: path of the module that adds to the stream; None where the stream ends.
    """

    axes: tuple[str, ...]
    reader: str | None
    writer: str | None

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient of the reader's input is a partial sum; none without a writer."""
        return () if self.writer is None else self.axes


def make_plan(
    model: nn.Module,
    mesh: Mesh,
    rules: LogicalRules,
    *,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    strict: bool = False,
    allow_unused: bool = False,
    splits_backward: bool = False,
) -> Plan:
    """Plan the parameters, collectives and dispatch of all modules of a model; arguments and errors as `parallelize`.

    With `splits_backward`, a pipeline computes the gradients of inputs first, and of weights later. torch then takes
    apart the graph of each parameter, so that gradients are not reduced together.
    """
    if dispatch not in (known := ("auto", *STRATEGIES)):
        raise ValueError(f"dispatch must be one of {', '.join(map(repr, known))}, got {dispatch!r}")
    shardings = shardings_by_name(model, mesh, rules, strict=strict, allow_unused=allow_unused)
    planner = _Planner(model, mesh, rules, shardings, dispatch, splits_backward=splits_backward)
    plan = Plan(
        mesh=mesh,
        tokens=planner.tokens,
        model=model,
        modules=planner.module_plans(),
        axes_of_tokens=planner.axes_of_tokens(),
    )
    _check_whole_sequences(plan)
    _check_dtypes(plan)
    _check_chunks(plan, num_chunks)
    return plan


def _check_dtypes(plan: Plan) -> None:
    """Raise for trained parameters of several dtypes in one group of FSDP2, such as float32 adapters."""
    first: dict[str, ParameterPlan] = {}
    for parameter in plan.parameters.values():
        if parameter.fsdp_block is None or not parameter.is_trained:
            continue
        other = first.setdefault(parameter.fsdp_block, parameter)
        if other.parameter.dtype != parameter.parameter.dtype:
            raise ValueError(
                f"FSDP2 shards the trained parameters of {parameter.fsdp_block or 'the model'} together, so they must "
                f"have one dtype, got {other.parameter.dtype} of {other.name} and {parameter.parameter.dtype} of "
                f"{parameter.name}: cast one of them, or freeze it"
            )


def _check_whole_sequences(plan: Plan) -> None:
    axes = plan.tokens.length_axes
    for path, planned in plan.items():
        if axes and declaration_of(planned.module).needs_whole_sequences:
            raise ValueError(
                f"{path or type(planned.module).__name__} needs whole sequences, sharded here over {axes}: "
                "choose rules that do not shard activation_length over them, such as 'ep-as-dp'"
            )


def _check_chunks(plan: Plan, num_chunks: int) -> None:
    check_int("num_chunks", num_chunks, at_least=1)
    for path, (_, dispatch_plan) in plan.layers.items():
        if num_chunks > 1 and dispatch_plan.config.capacity_factor is not None:
            raise ValueError(
                f"num_chunks must be 1 for {path or 'a layer'} with capacity_factor, which is per sequence, "
                f"got {num_chunks}"
            )


class _Planner:
    """Makes the plan of each module from the shardings, FSDP units, axes and dispatch of all modules of a model."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        rules: LogicalRules,
        shardings: Mapping[str, ParameterSharding],
        dispatch: Dispatch,
        *,
        splits_backward: bool,
    ) -> None:
        self.mesh, self.rules, self.shardings, self.splits_backward = mesh, rules, shardings, splits_backward
        self.tokens = ShardedTokens(mesh, *token_sharding(mesh, rules).spec)
        self.modules = dict(model.named_modules())
        self.units = fsdp_units(model)
        self.parallel_axes = {
            unit: tensor_parallel_axes(unit, [shardings[name] for name in names.values()], rules, self.tokens)
            for unit, names in self.units.items()
        }
        self.residual_parts = tuple(self._residual_parts())
        # The plan of each layer, also under the module of its routed experts and the adapters around it.
        self.dispatch_plans: dict[nn.Module, DispatchPlan] = {}
        # Tensor-parallel modules whose partial outputs the enclosing layer reduces.
        self.reduced_by_layer: set[nn.Module | None] = set()
        for path, layer in self.modules.items():
            if isinstance(layer, MoELayer):
                plan = self._plan_dispatch(path, layer, dispatch)
                experts = [layer.routed_experts, *(wrapper for _, wrapper in wrappers_of(layer.part("experts")))]
                self.dispatch_plans |= dict.fromkeys([layer, *experts], plan)
                self.reduced_by_layer.update(experts, [layer.part("shared_experts")] if plan.shared_is_partial else [])
        self.blocks, self.shared_by_blocks = set(blocks(model)), shared_by_blocks(model)

    def module_plans(self) -> dict[str, ModulePlan]:
        """Plan every module, by its path."""
        readers = {part.reader: part for part in self.residual_parts}
        writers = {part.writer: part for part in self.residual_parts}
        plans = {}
        for path, module in self.modules.items():
            read, written, axes = readers.get(path), writers.get(path), self.parallel_axes.get(module, ())
            hooks = None
            if written is not None and not isinstance(module, MoELayer):
                hooks = TensorParallelHooks(self.mesh, axes, written.axes)
            elif axes and written is None and module not in self.reduced_by_layer:
                hooks = TensorParallelHooks(self.mesh, axes)
            plans[path] = ModulePlan(
                module=module,
                parameters=dict(self._plan_parameters(path, module)),
                tensor_parallel_hooks=hooks,
                residual_reader=None if read is None else ResidualReaderHook(self.mesh, read.axes, read.partial_axes),
                dispatch=self.dispatch_plans.get(module),
            )
        for unit, plan in plans.items():
            for name, parameter in plan.parameters.items():
                if (block := parameter.reduced_by) not in (None, unit):
                    plans[block].reduced[f"{unit}.{name}".removeprefix(f"{block}.")] = parameter
        return plans

    def axes_of_tokens(self) -> dict[str, tuple[str, ...]]:
        """Return, for each name of an activation dim, the axes of its rule that shard the tokens."""
        declarations = [declaration_of(module) for module in self.modules.values()]
        dims = (name for declaration in declarations for name in declaration.tensor_parallel_dims)
        names = dict.fromkeys(map(tensor_parallel_activation, dims))
        if "activation_embed" in self.rules.names and any(declaration.residual_stream for declaration in declarations):
            names["activation_embed"] = None
        parts = {name: part_axes(name, self.rules, self.tokens) for name in names}
        return {name: of_tokens for name, (_, of_tokens) in parts.items() if of_tokens}

    def _residual_parts(self) -> Iterator[ResidualPart]:
        for path, module in self.modules.items():
            stream = declaration_of(module).residual_stream
            if stream is None or "activation_embed" not in self.rules.names:
                continue
            axes, _ = part_axes("activation_embed", self.rules, self.tokens)
            ((axes,), _) = resolve(PartitionSpec(axes), self.mesh.sizes, (stream.hidden_size,))
            for children in stream.parts if axes else ():
                reader, writer = (child and f"{path}.{child}".lstrip(".") for child in children)
                # A reader or writer that another stage has reads or writes the stream there.
                if not any(isinstance(self.modules.get(child or ""), Absent) for child in (reader, writer)):
                    yield ResidualPart(axes, reader, writer)

    def _plan_dispatch(self, path: str, layer: MoELayer, dispatch: Dispatch) -> DispatchPlan:
        experts = layer.routed_experts
        stacked = self.shardings[next(iter(self.units[experts].values()))]  # all parameters begin with the expert dim
        local = DispatchPlan(
            config=layer.config,
            mesh=self.mesh,
            tensor_parallel_axes=self.parallel_axes[experts],
            embed_axes=next((part.axes for part in self.residual_parts if part.writer == path), ()),
        )
        try:
            plan = plan_dispatch(local, stacked, self.rules, self.tokens, dispatch)
        except ValueError as error:
            raise ValueError(f"{path or 'the layer'}: {error}") from None
        shared = layer.part("shared_experts")
        of_shared = set(self.parallel_axes.get(shared, ())) if isinstance(shared, SharedExperts) else None
        # Routed and shared experts share one all-reduce of the input's gradient and one of the output, if they are
        # partial over the same axes.
        return replace(plan, shared_is_partial=of_shared == set(plan.partial_axes))

    def _used(self, unit: nn.Module, parameter: ParameterSharding) -> NamedSharding:
        """Return the sharding in which a FSDP unit computes with a parameter.

        It does not follow from the stored sharding: if a parameter, such as a bias, lacks the tensor-parallel dim, a
        rule may shard another dim over the tensor-parallel axes, but every rank needs this dim whole.
        """
        dims, dispatch = declaration_of(unit).tensor_parallel_dims, self.dispatch_plans.get(unit)
        # Experts stay on their ranks, to which the dispatch sends the tokens.
        expert_axes = () if dispatch is None else dispatch.expert_axes
        names = parameter.names or (None,) * len(parameter.shape)
        spec = (
            self.parallel_axes[unit] if name in dims else expert_axes if (dim, name) == (0, "exp") else None
            for dim, name in enumerate(names)
        )
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _plan_parameters(self, unit_path: str, unit: nn.Module) -> Iterator[tuple[str, ParameterPlan]]:
        """Plan the parameters that a FSDP unit gathers, by their path in the unit."""
        tensor_parallel = self.parallel_axes.get(unit, ())
        # A parameter of the experts that all of them share, such as their norm, has a gradient from the experts of each
        # rank. A parameter of the layer has not: every rank has its whole gradient.
        has_experts = unit in self.dispatch_plans and not isinstance(unit, MoELayer)
        expert_axes = self.dispatch_plans[unit].expert_axes if has_experts else ()
        block = next((outer for outer in enclosing(unit_path) if self.modules[outer] in self.blocks), "")
        for path, name in self.units.get(unit, {}).items():
            used = self._used(unit, self.shardings[name])
            _check_blocks(name, self.shardings[name], used)
            parameter = unit.get_parameter(path)
            sharded = {axis for axes in used.spec for axis in axes}
            # A parameter that is added to the output is partial: zero on all ranks but one. Every rank along a
            # tensor-parallel axis has its whole gradient, so the gradient is not summed.
            added = tensor_parallel if path in declaration_of(unit).added_to_output else ()
            if sharded.intersection(added):
                raise ValueError(
                    f"{name} is in added_to_output of {type(unit).__name__}, so it must have none of its "
                    f"tensor_parallel_dims, got the logical names {self.shardings[name].names}"
                )
            read = next((part.partial_axes for part in self.residual_parts if name.startswith(f"{part.reader}.")), ())
            summed = dict.fromkeys((*self.tokens.axes, *tensor_parallel, *read, *expert_axes))
            partial = tuple(axis for axis in summed if axis not in sharded and axis not in added)
            stored, grad_used = self.shardings[name].sharding, NamedSharding(self.mesh, used.spec, partial)
            is_shared = parameter in self.shared_by_blocks
            of_fsdp = () if is_shared else fsdp_axes(stored, grad_used)
            unsharded = stored.without(*of_fsdp)
            is_reduced_by_block = block and not is_shared and not of_fsdp and not added and unsharded == used
            yield (
                path,
                ParameterPlan(
                    name,
                    self.shardings[name],
                    unsharded=unsharded,
                    used=replace(used, partial=added),
                    grad_used=grad_used,
                    grad_unsharded=NamedSharding(self.mesh, unsharded.spec, of_fsdp),
                    is_trained=parameter.requires_grad,
                    is_saved=is_saved(unit, path),
                    fsdp_unit=unit_path,
                    reduced_by=None if self.splits_backward else block if is_reduced_by_block else unit_path,
                    fsdp_block=block if of_fsdp else None,
                ),
            )


def part_axes(name: str, rules: LogicalRules, tokens: ShardedTokens) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of a dim of activations over which ranks compute parts of it, and those that shard the tokens.

    Ranks along axes that shard the tokens hold different tokens, whose partial outputs cannot be summed, so the dim is
    not sharded over them, and weights are gathered over them.
    """
    others = EXPERT_TOKEN_DIMS if name.endswith("_moe") else TOKEN_DIMS
    *_, axes = activation_spec((*others, name), tokens.mesh, rules)
    computed = tuple(axis for axis in axes if axis not in tokens.axes)
    return computed, tuple(axis for axis in axes if axis in tokens.axes)


def tensor_parallel_axes(
    unit: nn.Module, parameters: Sequence[ParameterSharding], rules: LogicalRules, tokens: ShardedTokens
) -> tuple[str, ...]:
    """Return the axes over which a module computes parts of its tensor-parallel dims; none without such dims.

    To these axes, the rules map both the weights and the activations of all these dims. All ranks along them hold the
    same tokens, and the product of their sizes divides the number of parts of each dim.
    """
    dims, mesh = declaration_of(unit).tensor_parallel_dims, tokens.mesh
    specs = [
        parameter.sharding.spec[parameter.names.index(name)]
        for name in dims
        for parameter in parameters
        if parameter.names is not None
        and name in parameter.names
        # Scales follow the codes, or else `_check_blocks` raises.
        and (parameter.stack_part is None or parameter.stack_part.part == "codes")
    ]
    candidates = [part_axes(tensor_parallel_activation(name), rules, tokens)[0] for name in dims]
    chosen: list[str] = []
    for axis in specs[0] if specs else ():  # in the order of the weights, which are sharded in this order
        is_common = all(axis in axes for axes in (*specs, *candidates))
        if is_common and all(parts % mesh.size(*chosen, axis) == 0 for parts in dims.values()):
            chosen.append(axis)
    return tuple(chosen)


def _check_blocks(name: str, parameter: ParameterSharding, used: NamedSharding) -> None:
    """Raise if ranks compute with shards of rows or columns that end inside of a block with one scale.

    Codes and scales that are gathered before they are used may be sharded anywhere.
    """
    part = parameter.stack_part
    if part is None or part.part != "codes":
        return
    _, *axes_of = used.spec
    for kind, axes, size, block in zip(("rows", "columns"), axes_of, part.sizes, part.block, strict=True):
        count = used.mesh.size(*axes)
        if count > 1 and size > block and size % (count * block):
            raise ValueError(
                f"{name.rpartition('.')[0]} is quantized as {part.format}, in blocks of {block} {kind}: the axes "
                f"{axes} must give each rank a multiple of {block} of its {size} {kind}, got {size / count:g}. Choose "
                "rules that do not shard them over these axes, or another format"
            )
