"""Plan of `parallelize`: how each parameter is stored and gathered, and how its gradient is reduced."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.nn import Checkpointed, MoE
from maxmoe.parallel.dispatch_plan import Dispatch, DispatchPlan, check_dispatch, plan_dispatch
from maxmoe.parallel.fsdp import blocks, fsdp_managed
from maxmoe.parallel.fsdp_units import fsdp_units
from maxmoe.parallel.parameter_sharding import ParameterSharding, parameter_shardings, tensor_parallel_activation
from maxmoe.parallel.part_axes import activation_parts, embed_parts, tensor_parallel_axes
from maxmoe.parallel.sharded_tokens import ShardedTokens, token_sharding
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.resolve import resolve
from maxmoe.sharding.rules import LogicalRules


@dataclass(frozen=True)
class ParameterPlan:
    """Shardings of a parameter from storage to use, and of its gradient back.

        value:     stored -- FSDP --> unsharded -- FSDP unit --> used
        gradient:  grad_used -- FSDP unit --> grad_unsharded -- FSDP --> stored

    Without FSDP, `unsharded` is `stored` and `grad_unsharded` is not partial.

    Args:
        name: path of the parameter in the model.
        parameter: logical names, shape, dtype and stored sharding of the parameter.
        unsharded: sharding before the forward of the FSDP unit; that of FSDP's unsharded parameter.
        used: sharding in the forward of the FSDP unit, over tensor-parallel axes and the axes of experts only.
        grad_used: sharding of the gradient in the backward of the FSDP unit: partial over the axes whose ranks hold
            different tokens or compute different parts.
        grad_unsharded: sharding of the gradient after the reduction by the FSDP unit: partial over the axes of FSDP.
        fsdp_unit: path of the module that gathers the parameter; "" for the whole model.
        fsdp_block: path of the block with which FSDP gathers the parameter, "" for the rest of the model; None without
            FSDP.
    """

    name: str
    parameter: ParameterSharding
    unsharded: NamedSharding
    used: NamedSharding
    grad_used: NamedSharding
    grad_unsharded: NamedSharding
    fsdp_unit: str
    fsdp_block: str | None

    @property
    def stored(self) -> NamedSharding:
        """Sharding between steps, in checkpoints and in the optimizer."""
        return self.parameter.sharding

    @property
    def is_gathered(self) -> bool:
        """Whether the FSDP unit gathers the parameter."""
        return self.unsharded != self.used

    def bytes(self, sharding: NamedSharding) -> int:
        """Compute the number of bytes of each rank's shard of the parameter in a sharding."""
        return sharding.bytes(self.parameter.shape, self.parameter.dtype)


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


class Plan:
    """Plan of the parameters, FSDP units and MoE layers of a module for `parallelize` and `maxmoe.planning`.

    Args:
        module: module that is not parallelized yet.
        mesh: mesh on which the module runs; may be planned.
        rules: rules that map logical names to mesh axes.
        strict: raise for names without rules, parameters without names, and dims that their axes do not divide.
        allow_unused: accept names of mesh and rules that have no effect.
        dispatch: dispatch strategy for experts on other ranks, or "auto".

    Attributes:
        dispatch_plans: dispatch plans of the MoE layers, by path.
        dispatch_of_experts: dispatch plans, by the module of the routed experts.
        residual_parts: readers and writers of sharded residual streams.
        axes_of_tokens: for each name of an activation dim, the axes of its rule that do not shard the dim, because they
            shard the tokens.
        reduced_by_layer: tensor-parallel modules whose partial outputs the MoE layer around them sums.

    Raises:
        ValueError: as `parameter_shardings`; if an axis of the experts does not divide their number.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        rules: LogicalRules,
        *,
        strict: bool = False,
        allow_unused: bool = False,
        dispatch: Dispatch = "auto",
    ) -> None:
        check_dispatch(dispatch)
        shardings = parameter_shardings(module, mesh, rules, strict=strict, allow_unused=allow_unused)
        self.mesh = mesh
        self.tokens = ShardedTokens(mesh, *token_sharding(mesh, rules).spec)
        self.modules = dict(module.named_modules())
        self.paths = {child: path for path, child in self.modules.items()}
        self.fsdp_units = fsdp_units(module)
        self.tensor_parallel_axes = {
            unit: tensor_parallel_axes(unit, [shardings[name] for name in names.values()], rules, self.tokens)
            for unit, names in self.fsdp_units.items()
        }
        self.residual_parts = tuple(self._residual_parts(rules))
        self.axes_of_tokens = self._axes_of_tokens(rules)
        layers = {path: layer for path, layer in self.modules.items() if isinstance(layer, MoE)}
        self.dispatch_plans = {
            path: self._plan_dispatch(path, layer, shardings, rules, dispatch) for path, layer in layers.items()
        }
        self.dispatch_of_experts: dict[nn.Module, DispatchPlan] = {
            layer.routed_experts: self.dispatch_plans[path] for path, layer in layers.items()
        }
        self.reduced_by_layer: set[nn.Module | None] = {
            *self.dispatch_of_experts,
            *(layer.shared_experts for path, layer in layers.items() if self.dispatch_plans[path].shared_is_partial),
        }
        used = {
            name: self._used(unit, shardings[name])
            for unit, names in self.fsdp_units.items()
            for name in names.values()
        }
        self.fsdp_managed = fsdp_managed(shardings, used, self.tokens)
        self.parameters: dict[str, ParameterPlan] = {}
        block_modules = set(blocks(module))
        for unit in self.fsdp_units:
            block = next((outer for outer in enclosing(self.paths[unit]) if self.modules[outer] in block_modules), "")
            self.parameters.update(self._plan_parameters(unit, shardings, used, block))

    def _residual_parts(self, rules: LogicalRules) -> Iterator["ResidualPart"]:
        for path, module in self.modules.items():
            stream = declaration_of(module).residual_stream
            if stream is None or "activation_embed" not in rules.names:
                continue
            axes = embed_parts(rules, self.tokens).computed
            ((axes,), _) = resolve(PartitionSpec(axes), self.mesh.sizes, (stream.hidden_size,))
            for children in stream.parts if axes else ():
                reader, writer = (child and f"{path}.{child}".lstrip(".") for child in children)
                yield ResidualPart(axes, stream.hidden_size, reader, writer)

    def _axes_of_tokens(self, rules: LogicalRules) -> dict[str, tuple[str, ...]]:
        declarations = [declaration_of(module) for module in self.modules.values()]
        names = {name: None for declaration in declarations for name in declaration.tensor_parallel_dims}
        parts = {tensor_parallel_activation(name): activation_parts(name, rules, self.tokens) for name in names}
        if "activation_embed" in rules.names and any(declaration.residual_stream for declaration in declarations):
            parts["activation_embed"] = embed_parts(rules, self.tokens)
        return {name: axes.of_tokens for name, axes in parts.items() if axes.of_tokens}

    def _plan_dispatch(
        self,
        path: str,
        layer: MoE,
        shardings: Mapping[str, ParameterSharding],
        rules: LogicalRules,
        dispatch: Dispatch,
    ) -> DispatchPlan:
        routed = self.fsdp_units[layer.routed_experts]
        stacked = shardings[routed["up_proj"]]
        try:
            plan = plan_dispatch(
                layer,
                stacked,
                self.mesh,
                rules,
                self.tokens,
                dispatch,
                tensor_parallel_axes=self.tensor_parallel_axes[layer.routed_experts],
                embed_axes=next((part.axes for part in self.residual_parts if part.writer == path), ()),
            )
        except ValueError as error:
            raise ValueError(f"{path or 'the layer'}: {error}") from None
        shared = layer.shared_experts
        of_shared = None if shared is None else set(self.tensor_parallel_axes[shared])
        # Routed and shared experts share one all-reduce of the input's gradient and one of the output, if they are
        # partial over the same axes.
        return replace(plan, shared_is_partial=of_shared == set(plan.partial_axes) == set(plan.sum_axes))

    def _used(self, unit: nn.Module, parameter: ParameterSharding) -> NamedSharding:
        """Return the sharding in which a FSDP unit computes with a parameter.

        It is not the stored sharding without gathered axes: a rule may map a tensor-parallel axis to another dim of a
        parameter without the tensor-parallel dim, such as a bias, and every rank needs this dim whole.
        """
        dims, experts = declaration_of(unit).tensor_parallel_dims, self.expert_axes(unit)
        names = parameter.names or (None,) * len(parameter.shape)
        return NamedSharding(
            self.mesh,
            PartitionSpec(
                *(
                    self.tensor_parallel_axes[unit] if name in dims else experts if dim == 0 else None
                    for dim, name in enumerate(names)
                )
            ),
        )

    def _plan_parameters(
        self,
        unit: nn.Module,
        shardings: Mapping[str, ParameterSharding],
        used_shardings: Mapping[str, NamedSharding],
        block: str,
    ) -> Iterator[tuple[str, ParameterPlan]]:
        """Plan the parameters that a FSDP unit gathers."""
        tensor_parallel = self.tensor_parallel_axes[unit]
        for path, name in self.fsdp_units[unit].items():
            fsdp_axes = self.fsdp_managed.axes if name in self.fsdp_managed.dims else ()
            unsharded, used = shardings[name].sharding.without(*fsdp_axes), used_shardings[name]
            sharded = {axis for axes in used.spec for axis in axes}
            # A parameter that one rank adds to the output is zero on the others, a partial sum. Every rank along a
            # tensor-parallel axis has its whole gradient, which must not be summed.
            added = tensor_parallel if path in declaration_of(unit).added_to_output else ()
            if sharded.intersection(added):
                raise ValueError(
                    f"{name} is in added_to_output of {type(unit).__name__}, so it must have none of its "
                    f"tensor_parallel_dims, got the logical names {shardings[name].names}"
                )
            read = next((part.partial_axes for part in self.residual_parts if name.startswith(f"{part.reader}.")), ())
            summed = (*self.tokens.axes, *tensor_parallel, *read)
            partial = tuple(axis for axis in summed if axis not in sharded and axis not in added)
            yield (
                name,
                ParameterPlan(
                    name,
                    shardings[name],
                    unsharded=unsharded,
                    used=replace(used, partial=added),
                    grad_used=NamedSharding(self.mesh, used.spec, partial),
                    grad_unsharded=NamedSharding(self.mesh, unsharded.spec, fsdp_axes),
                    fsdp_unit=self.paths[unit],
                    fsdp_block=block if fsdp_axes else None,
                ),
            )

    def expert_axes(self, module: nn.Module) -> tuple[str, ...]:
        """Return the axes over which the experts of a module are sharded; none for a module without experts."""
        plan = self.dispatch_of_experts.get(module)
        return () if plan is None else plan.expert_axes

    def layer(self, path: str) -> MoE:
        """Return the MoE layer at a path."""
        layer = self.modules[path]
        assert isinstance(layer, MoE)
        return layer

    def is_recomputed(self, path: str) -> bool:
        """Return whether the module at a path is recomputed in the backward."""
        module = self.modules[path]
        return isinstance(module, Checkpointed) and module.is_recomputed

    def recomputed_by(self, path: str) -> str | None:
        """Return the path of the innermost recomputed module that is or contains the module at a path, or None."""
        return next(filter(self.is_recomputed, enclosing(path)), None)


def enclosing(path: str) -> list[str]:
    """Return the paths of a module and of all modules that contain it, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
