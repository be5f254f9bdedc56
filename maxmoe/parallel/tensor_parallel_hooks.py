"""The hooks of a tensor-parallel module: its input is replicated, its output a sum of partial outputs.

Every rank along the tensor-parallel axes has the same input and a part of the weights. In the forward, the partial
outputs are all-reduced; in the backward, the gradients of the input are, each rank having that of its own part.
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
    """The communication at the boundary of one module.

    Args:
        mesh: of the ranks.
        axes: the tensor-parallel axes of the module, none for one that every rank computes whole.
        embed_axes: that shard the residual stream which the module adds to: outputs are reduce-scattered over them, and
            the gradient of the input stays a partial sum over them, for the reader of the stream to reduce-scatter.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    embed_axes: tuple[str, ...] = ()

    def register(self, module: nn.Module) -> None:
        """Install the hooks."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    @not_compiled
    def _enter(self, _module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tree_map(self._input, (arguments, options))

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
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
    """The all-gather of a residual stream before a module that reads it.

    Args:
        mesh: of the ranks.
        embed_axes: that shard the stream.
        partial: the axes over which the gradient of what the module reads is a partial sum: those of the stream if a
            writer follows, none if every rank goes on with the same.
    """

    mesh: Mesh
    embed_axes: tuple[str, ...]
    partial: tuple[str, ...]

    def register(self, module: nn.Module) -> None:
        """Install the hook."""
        module.register_forward_pre_hook(self._enter)

    @not_compiled
    def _enter(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = arguments[0]
        outside = embed_sharding(self.mesh, x.dim(), self.embed_axes)
        whole = NamedSharding.replicated(self.mesh, x.dim())
        partial = NamedSharding.replicated(self.mesh, x.dim(), partial=self.partial)
        return redistribute_local(x, outside, whole, grad_source=partial, grad_target=outside), *arguments[1:]
