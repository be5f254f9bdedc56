"""A module that gathers its parameters before its forward and forgets them after it."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.sharding.assign import Assignment
from maxmoe.sharding.movement import Layout, Move, gather_parameter, move
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.sharded_tokens import ShardedTokens


@dataclass
class ParallelUnit:
    """The hooks of one module.

    Over the kept axes every rank has the same input and a part of the weights. Its output is a summand, its gradient
    of the input too: the sum is taken on the way out in the forward, and on the way in in the backward.

    Args:
        tokens: which axes spread the tokens.
        kept: the axes that are not gathered.
        parameters: that the module gathers, by their path within it.
    """

    tokens: ShardedTokens
    kept: tuple[str, ...]
    parameters: dict[str, Assignment]
    _stored: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        """Install the hooks."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        gathered: dict[int, Tensor] = {}
        for path, assignment in self.parameters.items():
            prefix, _, name = path.rpartition(".")
            owner = module.get_submodule(prefix)
            parameter = owner._parameters[name]
            assert isinstance(parameter, DTensor)
            if id(parameter) not in gathered:
                gathered[id(parameter)] = self._gather(parameter, assignment)
            self._stored.append((owner, name, parameter))
            owner._parameters[name] = gathered[id(parameter)]
        if not self.kept:
            return None
        return (
            tuple(self._entering(argument) for argument in arguments),
            {name: self._entering(argument) for name, argument in options.items()},
        )

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        while self._stored:
            owner, name, parameter = self._stored.pop()
            owner._parameters[name] = parameter  # type: ignore[assignment]
        if output is None or not self.kept:
            return output
        if not isinstance(output, Tensor):
            raise TypeError(f"{type(module).__name__} has parallel_dims and must return a tensor, got {type(output)}")
        whole = Layout(PartitionSpec(*(None,) * output.dim()))
        return move(output, self.tokens.mesh, Move(replace(whole, sums=self.kept), whole), Move(whole, whole))

    def _entering(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        whole = Layout(PartitionSpec(*(None,) * value.dim()))
        return move(value, self.tokens.mesh, Move(whole, whole), Move(replace(whole, sums=self.kept), whole))

    def _gather(self, parameter: DTensor, assignment: Assignment) -> Tensor:
        stored = Layout(assignment.sharding.spec)
        used = Layout(PartitionSpec(*(tuple(axis for axis in axes if axis in self.kept) for axes in stored.spec)))
        sharding = {axis for axes in used.spec for axis in axes}
        spread = (*self.tokens.batch_axes, *self.tokens.length_axes, *self.kept)
        summands = replace(used, sums=tuple(axis for axis in spread if axis not in sharding))
        return gather_parameter(parameter, self.tokens.mesh, Move(stored, used), Move(summands, stored))
