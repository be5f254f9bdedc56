"""Makes the plan of `parallelize` from the declarations of the modules, the mesh and the rules."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from maxmoe.adapters import wrappers_of
from maxmoe.declaration import Absent, declaration_of
from maxmoe.nn import MoE, SharedExperts
from maxmoe.parallel.blocks_of_scales import check_blocks
from maxmoe.parallel.dispatch_plan import Dispatch, DispatchPlan, check_dispatch, plan_dispatch
from maxmoe.parallel.fsdp import blocks, fsdp_axes, shared_by_blocks
from maxmoe.parallel.fsdp_units import fsdp_units, is_saved
from maxmoe.parallel.parameter_sharding import ParameterSharding, shardings_by_name, tensor_parallel_activation
from maxmoe.parallel.part_axes import activation_parts, embed_parts, tensor_parallel_axes
from maxmoe.parallel.plan import ModulePlan, ParameterPlan, Plan, enclosing
from maxmoe.parallel.sharded_tokens import ShardedTokens, token_sharding
from maxmoe.parallel.tensor_parallel_hooks import ResidualReaderHook, TensorParallelHooks
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.resolve import resolve
from maxmoe.sharding.rules import LogicalRules


class ResidualPart(NamedTuple):
    """Reader and writer of a residual stream that is sharded along the hidden dim; see `ResidualStream`.

    Args:
        axes: mesh axes that shard the stream.
        hidden_size: D, hidden size of the stream.
        reader: path of the module that reads the stream; None where the stream begins.
        writer: path of the module that adds to the stream; None where the stream ends.
    """

    axes: tuple[str, ...]
    hidden_size: int
    reader: str | None
    writer: str | None

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient of the reader's input is a partial sum."""
        return () if self.writer is None else self.axes


def make_plan(
    model: nn.Module,
    mesh: Mesh,
    rules: LogicalRules,
    *,
    strict: bool = False,
    allow_unused: bool = False,
    dispatch: Dispatch = "auto",
) -> Plan:
    """Plan the parameters, collectives and dispatch of all modules of a model.

    Args:
        model: model that is not parallelized yet.
        mesh: mesh on which the model runs; may be planned.
        rules: rules that map logical names to mesh axes.
        strict: raise for names without rules, parameters without names, and dims that their axes do not divide.
        allow_unused: accept names of mesh and rules that have no effect.
        dispatch: dispatch strategy for experts on other ranks, or "auto".

    Raises:
        ValueError: as `parameter_shardings`; if an axis of the experts does not divide their number.
    """
    check_dispatch(dispatch)
    shardings = shardings_by_name(model, mesh, rules, strict=strict, allow_unused=allow_unused)
    planner = _Planner(model, mesh, rules, shardings, dispatch)
    return Plan(
        mesh=mesh,
        tokens=planner.tokens,
        model=model,
        modules=planner.module_plans(),
        axes_of_tokens=planner.axes_of_tokens(),
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
    ) -> None:
        self.mesh, self.rules, self.shardings = mesh, rules, shardings
        self.tokens = ShardedTokens(mesh, *token_sharding(mesh, rules).spec)
        self.modules = dict(model.named_modules())
        self.units = fsdp_units(model)
        self.parallel_axes = {
            unit: tensor_parallel_axes(unit, [shardings[name] for name in names.values()], rules, self.tokens)
            for unit, names in self.units.items()
        }
        self.residual_parts = tuple(self._residual_parts())
        layers = {path: layer for path, layer in self.modules.items() if isinstance(layer, MoE)}
        # The module of the routed experts of each layer, and the adapters around it.
        experts = {
            layer: [layer.routed_experts, *(wrapper for _, wrapper in wrappers_of(layer.experts))]
            for layer in layers.values()
        }
        # The plan of each layer, also under these modules.
        self.dispatch_plans: dict[nn.Module, DispatchPlan] = {}
        for path, layer in layers.items():
            plan = self._plan_dispatch(path, layer, dispatch)
            self.dispatch_plans |= dict.fromkeys([layer, *experts[layer]], plan)
        # Tensor-parallel modules whose partial outputs the enclosing layer reduces.
        self.reduced_by_layer = {module for modules in experts.values() for module in modules} | {
            layer.shared_experts for layer in layers.values() if self.dispatch_plans[layer].shared_is_partial
        }
        self.blocks, self.shared_by_blocks = set(blocks(model)), shared_by_blocks(model)

    def module_plans(self) -> dict[str, ModulePlan]:
        """Plan every module, by its path."""
        readers = {part.reader: part for part in self.residual_parts}
        writers = {part.writer: part for part in self.residual_parts}
        plans = {}
        for path, module in self.modules.items():
            read, written, axes = readers.get(path), writers.get(path), self.parallel_axes.get(module, ())
            hooks = None
            if written is not None and not isinstance(module, MoE):
                hooks = TensorParallelHooks(self.mesh, axes, written.axes, has_grad_input=written.reader is not None)
            elif axes and written is None and module not in self.reduced_by_layer:
                hooks = TensorParallelHooks(self.mesh, axes)
            plans[path] = ModulePlan(
                module=module,
                parameters=dict(self._plan_parameters(path, module)),
                tensor_parallel_axes=axes,
                tensor_parallel_hooks=hooks,
                residual_reader=None if read is None else ResidualReaderHook(self.mesh, read.axes, read.partial_axes),
                stream_size=next((part.hidden_size for part in (read, written) if part is not None), None),
                dispatch=self.dispatch_plans.get(module),
            )
        return plans

    def axes_of_tokens(self) -> dict[str, tuple[str, ...]]:
        """Return, for each name of an activation dim, the axes of its rule that shard the tokens."""
        declarations = [declaration_of(module) for module in self.modules.values()]
        names = {name: None for declaration in declarations for name in declaration.tensor_parallel_dims}
        parts = {tensor_parallel_activation(name): activation_parts(name, self.rules, self.tokens) for name in names}
        if "activation_embed" in self.rules.names and any(declaration.residual_stream for declaration in declarations):
            parts["activation_embed"] = embed_parts(self.rules, self.tokens)
        return {name: axes.of_tokens for name, axes in parts.items() if axes.of_tokens}

    def _residual_parts(self) -> Iterator[ResidualPart]:
        for path, module in self.modules.items():
            stream = declaration_of(module).residual_stream
            if stream is None or "activation_embed" not in self.rules.names:
                continue
            axes = embed_parts(self.rules, self.tokens).computed
            ((axes,), _) = resolve(PartitionSpec(axes), self.mesh.sizes, (stream.hidden_size,))
            for children in stream.parts if axes else ():
                reader, writer = (child and f"{path}.{child}".lstrip(".") for child in children)
                # A reader or writer that another stage has reads or writes the stream there.
                if not any(isinstance(self.modules.get(child or ""), Absent) for child in (reader, writer)):
                    yield ResidualPart(axes, stream.hidden_size, reader, writer)

    def _plan_dispatch(self, path: str, layer: MoE, dispatch: Dispatch) -> DispatchPlan:
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
        shared = layer.shared_experts
        of_shared = set(self.parallel_axes[shared]) if isinstance(shared, SharedExperts) else None
        # Routed and shared experts share one all-reduce of the input's gradient and one of the output, if they are
        # partial over the same axes.
        return replace(plan, shared_is_partial=of_shared == set(plan.partial_axes) == set(plan.sum_axes))

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
        block = next((outer for outer in enclosing(unit_path) if self.modules[outer] in self.blocks), "")
        for path, name in self.units.get(unit, {}).items():
            used = self._used(unit, self.shardings[name])
            check_blocks(name, self.shardings[name], used)
            parameter = unit.get_parameter(path)
            is_shared = parameter in self.shared_by_blocks
            of_fsdp = () if is_shared else fsdp_axes(self.shardings[name], used, self.tokens)
            unsharded = self.shardings[name].sharding.without(*of_fsdp)
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
            summed = (*self.tokens.axes, *tensor_parallel, *read)
            partial = tuple(axis for axis in summed if axis not in sharded and axis not in added)
            yield (
                path,
                ParameterPlan(
                    name,
                    self.shardings[name],
                    unsharded=unsharded,
                    used=replace(used, partial=added),
                    grad_used=NamedSharding(self.mesh, used.spec, partial),
                    grad_unsharded=NamedSharding(self.mesh, unsharded.spec, of_fsdp),
                    is_trained=parameter.requires_grad,
                    is_saved=is_saved(unit, path),
                    fsdp_unit=unit_path,
                    fsdp_block=block if of_fsdp else None,
                ),
            )
