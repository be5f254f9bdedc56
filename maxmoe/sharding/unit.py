"""A module that gathers its parameters before its forward and forgets them after it."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from maxmoe.sharding.gathered import Gathered, in_backward
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout, Move, gather_parameter, move, stay, take_sum
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.sharded_tokens import ShardedTokens


class ParameterMoves(NamedTuple):
    """How a parameter comes to where it is used, and how its gradient goes back.

    Args:
        value: from the layout in which the forward finds it to that of the use.
        gradient: from the layout in which the use leaves it to that of the parameter.
        stored: the layout between forwards, before FSDP has gathered it.
    """

    value: Move
    gradient: Move
    stored: Layout


def parameter_moves(
    spec: PartitionSpec, tokens: ShardedTokens, *, kept: tuple[str, ...] = (), by_fsdp: tuple[str, ...] = ()
) -> ParameterMoves:
    """Find the moves of a parameter: gathered over all axes but the kept ones, its gradient summed over the tokens.

    Args:
        spec: as it is stored.
        tokens: which axes spread them.
        kept: axes whose ranks compute with their own part of it.
        by_fsdp: axes over which FSDP gathers the value before and sums the gradient after.

    Returns:
        The moves.
    """
    found = Layout(spec.without(*by_fsdp))
    used = Layout(PartitionSpec(*(tuple(axis for axis in axes if axis in kept) for axes in spec)))
    parts = {axis for axes in used.spec for axis in axes}
    sums = tuple(axis for axis in (*tokens.batch_axes, *tokens.length_axes, *kept) if axis not in parts)
    gradient = Move(replace(used, sums=sums), replace(found, sums=by_fsdp))
    return ParameterMoves(Move(found, used), gradient, Layout(spec))


@dataclass
class ParallelUnit:
    """The hooks of one module.

    Over the kept axes every rank has the same input and a part of the weights. Its output is a summand, its gradient
    of the input too: the sum is taken on the way out in the forward, and on the way in in the backward.

    Args:
        mesh: of the ranks.
        kept: the axes that are not gathered.
        moves: of the parameters that the module gathers, by their path within it.
    """

    mesh: Mesh
    kept: tuple[str, ...]
    moves: dict[str, ParameterMoves]
    _stored: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    _gathered: list[Gathered] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        """Install the hooks."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        gathered: dict[int, Tensor] = {}
        for path, moves in self.moves.items():
            prefix, _, name = path.rpartition(".")
            owner = module.get_submodule(prefix)
            parameter = _stored_at(owner, name)
            if id(parameter) not in gathered:
                gathered[id(parameter)] = self._gather(owner, name, moves)
            self._stored.append((owner, name, parameter))
            owner._parameters[name] = gathered[id(parameter)]  # type: ignore[assignment]
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
        if self.kept and output is not None:
            output = self._leaving(module, output)
        gathered, self._gathered = self._gathered, []
        if torch.is_grad_enabled() and not in_backward():
            self._release(gathered, output)
        return output

    def _gather(self, owner: nn.Module, name: str, moves: ParameterMoves) -> Tensor:
        tensor = gather_parameter(_stored_at(owner, name), self.mesh, moves.value, moves.gradient)
        if moves.value.source != moves.value.target:

            def gather_again() -> Tensor:
                parameter = _stored_at(owner, name)
                # On the output of the whole model this hook comes before that of FSDP.
                is_found = parameter.placements == moves.value.source.placements(self.mesh)
                value = moves.value if is_found else Move(moves.stored, moves.value.target)
                return gather_parameter(parameter, self.mesh, value, moves.gradient)

            self._gathered.append(Gathered(tensor, gather_again))
        return tensor

    def _release(self, gathered: list[Gathered], output: Any) -> None:
        """Give the memory of gathered parameters back until the backward comes to the output."""

        def restore(_gradient: Tensor) -> None:
            for parameter in gathered:
                parameter.restore()

        for parameter in gathered:
            parameter.release()
        for tensor in tree_leaves(output):
            if gathered and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(restore)  # type: ignore[no-untyped-call]

    def _leaving(self, module: nn.Module, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(f"{type(module).__name__} has parallel_dims and must return a tensor, got {type(output)}")
        return move(output, self.mesh, take_sum(output.dim(), self.kept), stay(output.dim()))

    def _entering(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return move(value, self.mesh, stay(value.dim()), take_sum(value.dim(), self.kept))


def _stored_at(owner: nn.Module, name: str) -> DTensor:
    """The parameter itself, as FSDP has left it."""
    parameter = owner._parameters[name]
    assert isinstance(parameter, DTensor)
    return parameter
