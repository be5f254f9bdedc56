"""Hooks of a tensor-parallel module: its input is replicated, its outputs are partial sums.

All ranks along the tensor-parallel axes have the same input and different shards of the weights. In the forward, their
partial outputs are all-reduced. In the backward, each rank has the gradient of the input through its shard only, so the
gradients of the input are all-reduced.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maxmoe._torch import never_compiled, tree_map
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import Redistribution, embed_sharding, redistribute_local


@dataclass(frozen=True)
class TensorParallelHooks:
    """Collectives on the input and on the output of one module.

    Args:
        axes: tensor-parallel axes of the module; none for a module that every rank computes whole.
        embed_axes: axes that shard the residual stream to which the module adds its output. Outputs are
            reduce-scattered over them. The gradient of the input stays partial over them, because the hook of the
            reader reduce-scatters it: one collective instead of an all-reduce and a slice.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    embed_axes: tuple[str, ...] = ()

    @never_compiled
    def enter(self, _module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Forward pre-hook: the gradients of all floating-point inputs are reduced in the backward."""
        return tree_map(self._mark_input, (arguments, options))

    def _mark_input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return redistribute_local(value, self._inputs(value.dim()), "the input of a tensor-parallel module")

    @never_compiled
    def leave(self, module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> Tensor:
        """Forward hook: reduce the outputs."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(module).__name__} declares tensor_parallel_dims and must return a tensor, got {type(output)}"
            )
        return redistribute_local(output, self._outputs(output.dim()), f"the output of {type(module).__name__}")

    def _inputs(self, num_dims: int) -> Redistribution:
        return Redistribution.reduce_gradient(self.mesh, num_dims, self.axes, left=self.embed_axes)

    def _outputs(self, num_dims: int) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, num_dims, self.axes, self.embed_axes)


@dataclass(frozen=True)
class ResidualReaderHook:
    """Forward pre-hook that all-gathers a sharded residual stream before a module that reads it.

    Args:
        embed_axes: axes that shard the stream.
        partial_axes: axes over which the gradient of the gathered stream is a partial sum: the axes of the stream if a
            writer follows, none if every rank continues with the same values.
    """

    mesh: Mesh
    embed_axes: tuple[str, ...]
    partial_axes: tuple[str, ...]

    @never_compiled
    def enter(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: all-gather the first argument."""
        stream = redistribute_local(arguments[0], self._stream(arguments[0].dim()), "the residual stream")
        return stream, *arguments[1:]

    def _stream(self, num_dims: int) -> Redistribution:
        # All-gather in the forward. In the backward, a reduce-scatter over `partial_axes`, a slice over other axes.
        outside = embed_sharding(self.mesh, num_dims, self.embed_axes)
        whole = NamedSharding.replicated(self.mesh, num_dims)
        partial = NamedSharding.replicated(self.mesh, num_dims, partial=self.partial_axes)
        return Redistribution((outside, whole), (partial, outside))
