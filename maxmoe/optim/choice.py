"""Which parameters are matrices of blocks, by their logical names; all others are not for Muon."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from torch import nn

from maxmoe.config import nearest
from maxmoe.nn.declaration import FusedGate, declaration_of
from maxmoe.optim.matrix import Matrix
from maxmoe.parallel.fsdp import blocks
from maxmoe.parallel.parameter_sharding import Names, logical_names

Override: TypeAlias = Matrix | Literal["adamw"]

STACKED = ("exp", "layers")  # logical names of dims that are no dims of a matrix


@dataclass(frozen=True)
class Choice:
    """What optimizes a parameter, and why.

    Args:
        name: the path of the parameter.
        shape: over all ranks.
        matrix: the matrices that Muon orthogonalises; None for AdamW.
        reason: what decided.
        num_dims: without stacked ones: fewer than two are those of norms and biases.
    """

    name: str
    shape: tuple[int, ...]
    matrix: Matrix | None
    reason: str
    num_dims: int

    @property
    def algorithm(self) -> str:
        """The name of the optimizer."""
        return "adamw" if self.matrix is None else "muon"


def choose(model: nn.Module, overrides: Mapping[str, Override]) -> list[Choice]:
    """Choose between Muon and AdamW for every parameter that is trained.

    Args:
        model: any module.
        overrides: choices by pattern of paths, see `parameter_groups`.

    Returns:
        The choices, in the order of `named_parameters`.

    Raises:
        ValueError: for patterns that match nothing; with all parameters of more dims than their names explain.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _check_overrides(overrides, parameters)
    chooser = _Chooser(model, overrides)
    choices, unexplained = [], {}
    for name, parameter in parameters.items():
        choice = chooser.choice(name, parameter)
        choices.append(choice)
        if choice.matrix is not None and not _fits(choice):
            unexplained[name] = f"{name} of shape {choice.shape}, which are no matrices {choice.matrix}"
        elif choice.matrix is None and not choice.reason:
            names = chooser.names.get(name)
            of_names = "no logical names" if names is None else f"the logical names {names}"
            unexplained[name] = f"{name} of shape {choice.shape} with {of_names}"
    if unexplained:
        raise ValueError(
            f"it is not known which dims are inputs and outputs of {'; '.join(unexplained.values())}. Name the input "
            "in input_dims of maxmoe.parallel.Declaration, or choose by "
            f"overrides={{{next(iter(unexplained))!r}: ...}}: "
            "maxmoe.optim.Matrix(input_dim=-1) for [..., out, in], -2 for [..., in, out], 'adamw' for no matrix"
        )
    return choices


def _check_overrides(overrides: Mapping[str, Override], names: Mapping[str, object]) -> None:
    for pattern, choice in overrides.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"overrides has {pattern!r}, which is no parameter that is trained{nearest(pattern, names)}"
            )
        if choice != "adamw" and not (
            isinstance(choice, Matrix) and choice.input_dim in (-1, -2) and choice.fused_gate in _LAYOUTS
        ):
            raise ValueError(
                f"overrides must be 'adamw' or maxmoe.optim.Matrix with input_dim -1 or -2 and fused_gate one of "
                f"{_LAYOUTS}, got {pattern!r}: {choice!r}"
            )


_LAYOUTS = (None, *get_args(FusedGate))


def _fits(choice: Choice) -> bool:
    """Whether the shape has the matrices, and an even number of outputs for a fused gate."""
    matrix, shape = choice.matrix, choice.shape
    assert matrix is not None
    return len(shape) >= 2 and (matrix.fused_gate is None or shape[-3 - matrix.input_dim] % 2 == 0)


class _Chooser:
    def __init__(self, model: nn.Module, overrides: Mapping[str, Override]) -> None:
        self.overrides = overrides
        self.names: dict[str, Names] = logical_names(model)
        self.declared = dict(_declared(model))
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for owner in model.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                self.owners[parameter].append((owner, name))
        found = list(blocks(model))
        self.in_blocks = {parameter for block in found for parameter in block.parameters()} if found else None

    def choice(self, name: str, parameter: nn.Parameter) -> Choice:
        shape, names = tuple(parameter.shape), self.names.get(name)
        dims = [dim for dim in names or shape if dim not in STACKED]
        override = next((choice for pattern, choice in self.overrides.items() if fnmatchcase(name, pattern)), None)
        if override is not None:
            matrix, reason = None if override == "adamw" else override, "overrides"
        elif names is not None:
            matrix, reason = self._by_names(name, parameter, dims)
        else:
            matrix, reason = self._by_the_usual_rule(parameter)
        return Choice(name, shape, matrix, reason, len(dims))

    def _by_names(self, name: str, parameter: nn.Parameter, dims: Sequence[object]) -> tuple[Matrix | None, str]:
        names = self.names[name]
        if name in self.declared:
            return self.declared[name], f"names {_written(names)}"
        if len(dims) < 2:
            return None, f"names {_written(names)}: a norm or a bias"
        if "vocab" in dims or self._is_in(parameter, nn.Embedding):
            return None, f"names {_written(names)}: an embedding or a head"
        if None in dims:
            return None, f"names {_written(names)}: a dim without a name, as that of a router"
        if len(names) == 2 and self._is_in(parameter, nn.Linear):
            return Matrix(), f"names {_written(names)} of nn.Linear"
        return None, ""

    def _by_the_usual_rule(self, parameter: nn.Parameter) -> tuple[Matrix | None, str]:
        """Matrices of `nn.Linear` in blocks, and stacks whose module says how they lie."""
        if parameter.dim() < 2:
            return None, "no names: a norm or a bias"
        if self._is_in(parameter, nn.Embedding):
            return None, "no names: an embedding"
        if self.in_blocks is not None and parameter not in self.in_blocks:
            return None, "no names: outside of the blocks"
        if parameter.dim() == 2 and self._is_in(parameter, nn.Linear):
            return Matrix(), "no names: nn.Linear"
        for owner, name in self.owners[parameter]:
            is_transposed: object = getattr(owner, "is_transposed", None)
            if parameter.dim() == 3 and isinstance(is_transposed, bool):
                fused = "gate_up" in name and getattr(owner, "has_gate", True)
                layout: FusedGate = "concatenated" if getattr(owner, "is_concatenated", True) else "interleaved"
                kind = f"no names: is_transposed of {type(owner).__name__}"
                return Matrix(-2 if is_transposed else -1, layout if fused else None), kind
        return None, "no names: two dims, but not nn.Linear" if parameter.dim() == 2 else ""

    def _is_in(self, parameter: nn.Parameter, kind: type[nn.Module]) -> bool:
        return any(isinstance(owner, kind) for owner, _ in self.owners[parameter])


def _written(names: Names) -> str:
    return ", ".join("-" if name is None else name for name in names)


def _declared(model: nn.Module) -> Iterator[tuple[str, Matrix]]:
    """The matrices that modules declare, by path; those of outer modules last, so that they take precedence."""
    for path, owner in reversed(list(model.named_modules())):
        declaration = declaration_of(owner)
        for name, dim in declaration.input_dims.items():
            input_dim = -1 if declaration.logical_names[name][-1] == dim else -2
            yield f"{path}.{name}".lstrip("."), Matrix(input_dim, declaration.fused_gates.get(name))
