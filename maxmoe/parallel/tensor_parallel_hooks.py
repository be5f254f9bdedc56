"""The hooks of a tensor-parallel module: its input is replicated, its output a sum of partial outputs.

Every rank along the tensor-parallel axes has the same input and a part of the weights. In the forward, the partial
outputs are all-reduced; in the backward, the gradients of the input are, each rank having that of its own part.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import all_reduce, all_reduce_gradient


@dataclass(frozen=True)
class TensorParallelHooks:
    """The communication at the boundary of one tensor-parallel module.

    Args:
        mesh: of the ranks.
        axes: the tensor-parallel axes of the module.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    def register(self, module: nn.Module) -> None:
        """Install the hooks."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    @not_compiled
    def _enter(self, _module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return (
            tuple(self._input(argument) for argument in arguments),
            {name: self._input(argument) for name, argument in options.items()},
        )

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return all_reduce_gradient(value, self.mesh, self.axes)

    @not_compiled
    def _leave(self, module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(module).__name__} declares tensor_parallel_dims and must return a tensor, got {type(output)}"
            )
        return all_reduce(output, self.mesh, self.axes)
