"""Hooks of a tensor-parallel module: its input is replicated, its outputs are partial sums.

All ranks along the tensor-parallel axes have the same input and different shards of the weights. In the forward, their
partial outputs are all-reduced. In the backward, each rank has the gradient of the input through its shard only, so the
gradients of the input are all-reduced.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maxmoe._torch import tree_map
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import embed_sharding, redistribute_local, reduce_outputs


@dataclass(frozen=True)
class TensorParallelHooks:
    """Collectives on the input and on the output of one module.

    Args:
        mesh: mesh on which the module runs.
        axes: tensor-parallel axes of the module; none for a module that every rank computes whole.
        embed_axes: axes that shard the residual stream to which the module adds its output. Outputs are
            reduce-scattered over them. The gradient of the input stays partial over them, because the hook of the
            reader reduce-scatters it.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    embed_axes: tuple[str, ...] = ()

    def register(self, module: nn.Module) -> None:
        """Register the hooks on a module."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    @not_compiled
    def _enter(self, _module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tree_map(self._input, (arguments, options))

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # The forward is the identity. The backward sums over the axes in `axes` that are not in `embed_axes`. Over the
        # others, one reduce-scatter in the backward of the reader's all-gather replaces all-reduce and slice.
        whole = NamedSharding.replicated(self.mesh, value.dim())
        computed = NamedSharding.replicated(self.mesh, value.dim(), partial=self.axes)
        grad_input = NamedSharding.replicated(self.mesh, value.dim(), partial=self.embed_axes)
        return redistribute_local(value, whole, whole, grad_source=computed, grad_target=grad_input)

    @not_compiled
    def _leave(self, module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(module).__name__} declares tensor_parallel_dims and must return a tensor, got {type(output)}"
            )
        return reduce_outputs(output, self.mesh, self.axes, self.embed_axes)


@dataclass(frozen=True)
class ResidualReaderHook:
    """Forward pre-hook that all-gathers a sharded residual stream before a module that reads it.

    Args:
        mesh: mesh on which the module runs.
        embed_axes: axes that shard the stream.
        partial: axes over which the gradient of the gathered stream is a partial sum: those of the stream if a writer
            follows, none if every rank continues with the same values.
    """

    mesh: Mesh
    embed_axes: tuple[str, ...]
    partial: tuple[str, ...]

    def register(self, module: nn.Module) -> None:
        """Register the hook on a module."""
        module.register_forward_pre_hook(self._enter)

    @not_compiled
    def _enter(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # All-gather in the forward. In the backward, a reduce-scatter over the axes in `partial`, a slice over others.
        x: Tensor = arguments[0]
        outside = embed_sharding(self.mesh, x.dim(), self.embed_axes)
        whole = NamedSharding.replicated(self.mesh, x.dim())
        partial = NamedSharding.replicated(self.mesh, x.dim(), partial=self.partial)
        return redistribute_local(x, outside, whole, grad_source=partial, grad_target=outside), *arguments[1:]
