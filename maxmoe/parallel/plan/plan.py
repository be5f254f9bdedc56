"""Plan of `parallelize`: shardings, collectives and dispatch of each module of a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from maxmoe.nn import Checkpointed, MoELayer
from maxmoe.parallel.plan.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens
from maxmoe.parallel.plan.tensor_parallel_hooks import ResidualReaderHook, TensorParallelHooks
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import Redistribution, joint_steps


@dataclass(frozen=True)
class ParameterPlan:
    """Shardings of a parameter from storage to use, and of its gradient back.

        value:     stored -- FSDP --> unsharded -- FSDP unit --> used
        gradient:  grad_used -- FSDP unit --> grad_unsharded -- FSDP --> stored

    Without FSDP, `unsharded` is `stored` and `grad_unsharded` is not partial. With FSDP, all sums of the gradient over
    axes that replicate the parameter are left to FSDP, which adds up the shards.

    Args:
        name: path of the parameter in the model.
        parameter: logical names, shape, dtype and stored sharding of the parameter.
        unsharded: sharding after FSDP has gathered the parameter, before the forward of the FSDP unit.
        used: sharding in the forward of the FSDP unit, over tensor-parallel axes and the axes of experts only.
        grad_used: sharding of the gradient in the backward of the FSDP unit: partial over the axes whose ranks hold
            different tokens or compute different parts.
        grad_unsharded: sharding of the gradient after the reduction by the FSDP unit: partial over the axes of FSDP.
        fsdp_unit: path of the module that gathers the parameter; "" for the whole model.
        reduced_by: path of the module that reduces the gradient, together with gradients of other parameters: the FSDP
            unit, or the block for a parameter that nothing gathers. None for a gradient that is reduced alone.
        fsdp_block: path of the block with which FSDP gathers the parameter, "" for the rest of the model; None without
            FSDP.
        is_trained: whether the parameter requires a gradient; a frozen one has no gradient and no optimizer state.
        is_saved: whether the backward of the modules reads the parameter, so that the FSDP unit gathers it again. What
            autograd has really saved does not count: it would be asked on each rank alone.
    """

    name: str
    parameter: ParameterSharding
    unsharded: NamedSharding
    used: NamedSharding
    grad_used: NamedSharding
    grad_unsharded: NamedSharding
    fsdp_unit: str
    reduced_by: str | None
    fsdp_block: str | None
    is_trained: bool = True
    is_saved: bool = True

    @property
    def stored(self) -> NamedSharding:
        """Sharding between steps, in checkpoints and in the optimizer."""
        return self.parameter.sharding

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard of every rank between steps."""
        return self.stored.shard_shape(self.parameter.shape)

    @property
    def local_bytes(self) -> int:
        """Number of bytes of the shard of every rank between steps."""
        return self.bytes(self.stored)

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP reduces the gradient, the one that shards the parameter last; none without FSDP."""
        return self.grad_unsharded.partial

    @property
    def gathering(self) -> Redistribution:
        """Redistribution of the parameter by the FSDP unit before its forward, and of the gradient in the backward."""
        return Redistribution((self.unsharded, self.used), (self.grad_used, self.grad_unsharded))

    @property
    def is_gathered(self) -> bool:
        """Whether the FSDP unit gathers the parameter."""
        return self.unsharded != self.used

    def bytes(self, sharding: NamedSharding) -> int:
        """Compute the number of bytes of each rank's shard of the parameter in a sharding."""
        return sharding.bytes(self.parameter.shape, self.parameter.dtype)


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """Plan of one module.

    Args:
        parameters: parameters that the module gathers as a FSDP unit, by their path in the module.
        reduced: parameters of FSDP units inside of the module whose gradients it reduces as a block, likewise.
        tensor_parallel_hooks: collectives on input and output; None if there are none or the MoE layer runs them.
        residual_reader: all-gather of the residual stream that the module reads; None if the stream is not sharded.
        dispatch: dispatch of tokens in a MoE layer, also for the module of its routed experts; None for other modules.
    """

    module: nn.Module
    parameters: dict[str, ParameterPlan]
    reduced: dict[str, ParameterPlan] = field(default_factory=dict)
    tensor_parallel_hooks: TensorParallelHooks | None = None
    residual_reader: ResidualReaderHook | None = None
    dispatch: DispatchPlan | None = None

    @property
    def reduction_axes(self) -> tuple[tuple[str, ...], ...]:
        """Axes of each group of ranks in which the module reduces gradients."""
        own = (each for each in self.parameters.values() if each.reduced_by in (each.fsdp_unit, None))
        trained = (each for each in (*self.reduced.values(), *own) if each.is_trained)
        steps = (step for each in trained for ((_, step),) in joint_steps((each.gathering.backward,)))
        return tuple(dict.fromkeys(step.axes for step in steps if step.kind != "slice"))

    @property
    def is_recomputed(self) -> bool:
        """Whether the module is recomputed in the backward."""
        return isinstance(self.module, Checkpointed) and self.module.is_recomputed


@dataclass(frozen=True, kw_only=True)
class Plan(Mapping[str, ModulePlan]):
    """Plans of the modules of a model, by their path, for `parallelize` and `maxmoe.costs`.

    Args:
        mesh: mesh on which the model runs; may be planned.
        tokens: token group, with the mesh axes that shard the tokens.
        model: the model, also in the plan of a part of it.
        axes_of_tokens: for each name of an activation dim, the axes of its rule that do not shard the dim, because they
            shard the tokens.
    """

    mesh: Mesh
    tokens: ShardedTokens
    model: nn.Module
    modules: Mapping[str, ModulePlan]
    axes_of_tokens: Mapping[str, tuple[str, ...]]

    def __getitem__(self, path: str) -> ModulePlan:
        return self.modules[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    @cached_property
    def parameters(self) -> Mapping[str, ParameterPlan]:
        """Plans of all parameters, by their path."""
        return {plan.name: plan for module in self.values() for plan in module.parameters.values()}

    @cached_property
    def fsdp_blocks(self) -> Mapping[str, nn.Module]:
        """Modules to which FSDP2 is applied, by their path: blocks, then the model for parameters outside of them."""
        paths = {parameter.fsdp_block for parameter in self.parameters.values()}
        return {path: self[path].module for path in sorted(self, key=lambda path: path == "") if path in paths}

    @cached_property
    def layers(self) -> Mapping[str, tuple[MoELayer, DispatchPlan]]:
        """MoE layers with the plan of their dispatch, by their path."""
        return {
            path: (plan.module, plan.dispatch)
            for path, plan in self.items()
            if isinstance(plan.module, MoELayer) and plan.dispatch is not None
        }

    @property
    def embed_axes(self) -> tuple[str, ...]:
        """Axes that shard the residual stream; none if it is not sharded."""
        readers = (module.residual_reader for module in self.values())
        return next((reader.embed_axes for reader in readers if reader is not None), ())


def enclosing(path: str) -> list[str]:
    """Return the paths of a module and of all modules that contain it, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
