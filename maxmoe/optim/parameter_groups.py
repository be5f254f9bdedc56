"""The parameter groups of a model: Muon for the matrices of blocks, AdamW for all other parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from torch import nn

from maxmoe.adapters import factor_names
from maxmoe.checks.fields import nearest
from maxmoe.declaration import FusedGate, declaration_of
from maxmoe.optim.newton_schulz import Matrix
from maxmoe.parallel.plan.fsdp_units import blocks
from maxmoe.parallel.plan.parameter_sharding import Names, logical_names
from maxmoe.text_table import terminal_width, text_table

Override: TypeAlias = Matrix | Literal["adamw"]

STACKED = ("exp", "layers")  # logical names of dims along which matrices are stacked


@dataclass(frozen=True)
class Choice:
    """The algorithm that updates a parameter, and the reason.

    Args:
        name: path of the parameter.
        shape: shape of the parameter over all ranks.
        matrix: the matrices that Muon orthogonalises; None for AdamW.
        reason: rule that selected the algorithm.
        num_dims: number of dims that are not stacked; norms and biases have fewer than two.
    """

    name: str
    shape: tuple[int, ...]
    matrix: Matrix | None
    reason: str
    num_dims: int

    @property
    def algorithm(self) -> str:
        """Algorithm of the parameter: "muon" or "adamw"."""
        return "adamw" if self.matrix is None else "muon"


class ParameterGroups(list[dict[str, Any]]):
    """Result of `parameter_groups`: a list of groups. As a string, a table of all choices, as wide as the terminal.

    Args:
        groups: groups for `Muon`.
        choices: one choice per trained parameter.
        frozen: names of the parameters that are in no group, because they are not trained.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], choices: Sequence[Choice], frozen: Sequence[str]) -> None:
        super().__init__(groups)
        self.choices, self.frozen = tuple(choices), tuple(frozen)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "optimizer", "matrices", "reason")]
        for choice in self.choices:
            shape = " x ".join(map(str, choice.shape))
            matrices = "" if choice.matrix is None else str(choice.matrix)
            rows.append((choice.name, shape, choice.algorithm, matrices, choice.reason))
        rows += [(name, "", "none", "", "frozen") for name in self.frozen]
        return text_table(rows, width=terminal_width())


def parameter_groups(
    model: nn.Module,
    overrides: Mapping[str, Override] | None = None,
    *,
    adamw: Mapping[str, Any] | None = None,
) -> ParameterGroups:
    """Choose between Muon and AdamW for every parameter of a model.

    By logical names, Muon takes matrices of blocks and stacks of them; AdamW takes embeddings, heads, routers, norms
    and biases, norms and biases without weight decay. If a parameter has no logical names, Muon takes weights of
    `nn.Linear` in blocks, and stacks of matrices whose module has the attribute `is_transposed`, such as the experts of
    transformers; AdamW takes all others of one or two dims. A name that ends with "bias" is a bias, and a matrix of one
    row or column, such as the gate of shared experts in transformers, a vector without weight decay. Blocks are the
    children of the outermost `nn.ModuleList`s, or the whole model if there are none. Frozen parameters are in no group.
    AdamW takes the low-rank factors of stacked matrices; after `maxmoe.parallelize`, `overrides` may give them to Muon.

    Args:
        model: before or after `maxmoe.parallelize`; make the optimizer after it.
        overrides: choices by path of the parameter, or pattern with ``*``: "adamw", or a `Matrix` with the input dim.
            The first match counts.
        adamw: options of the groups of AdamW, with the names of `torch.optim.AdamW`: lr, betas, eps, weight_decay.

    Returns:
        List of groups. `print` shows every choice and its reason.

    Raises:
        ValueError: for an override that matches no parameter, with the most similar names; for a parameter whose input
            and output dims are unknown.

    Example:
        ``Muon(parameter_groups(model, {"router.*": Matrix()}, adamw={"betas": (0.9, 0.95)}), lr=1e-3)``
    """
    choices = choose(model, overrides or {})
    parameters = dict(model.named_parameters())
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for choice in choices:
        decays = choice.num_dims >= 2
        if choice.matrix is not None:
            options = choice.matrix._asdict()
        else:
            options = {**(adamw or {}), **({} if decays else {"weight_decay": 0.0})}
        key = choice.matrix, choice.matrix is None and decays
        group = groups.setdefault(key, {"params": [], "algorithm": choice.algorithm, **options})
        group["params"].append((choice.name, parameters[choice.name]))
    chosen = {choice.name for choice in choices}
    return ParameterGroups([*groups.values()], choices, [name for name in parameters if name not in chosen])


def choose(model: nn.Module, overrides: Mapping[str, Override]) -> list[Choice]:
    """Choose between Muon and AdamW for every trained parameter, in the order of `named_parameters`."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern, value in overrides.items():
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ValueError(
                f"overrides has {pattern!r}, which matches no trained parameter{nearest(pattern, parameters)}"
            )
        if value != "adamw" and not isinstance(value, Matrix):
            raise ValueError(f"overrides must be 'adamw' or maxmoe.optim.Matrix, got {pattern!r}: {value!r}")
    chooser = _Chooser(model, overrides)
    choices = [chooser.choice(name, parameter) for name, parameter in parameters.items()]
    problems = {choice.name: problem for choice in choices if (problem := chooser.problem(choice))}
    if problems:
        raise ValueError(
            f"it is not known which dims are inputs and outputs of {'; '.join(problems.values())}. Name the input "
            "in input_dims of maxmoe.parallel.Declaration, or choose by "
            f"overrides={{{next(iter(problems))!r}: ...}}: "
            "maxmoe.optim.Matrix(input_dim=-1) for [..., out, in], -2 for [..., in, out], 'adamw' for no matrix"
        )
    return choices


class _Chooser:
    """Rules that choose between Muon and AdamW for the parameters of a model."""

    def __init__(self, model: nn.Module, overrides: Mapping[str, Override]) -> None:
        self.overrides = overrides
        self.names: dict[str, Names] = logical_names(model)
        self.factors = factor_names(model)
        self.declared: dict[str, Matrix] = {}
        self.owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for path, owner in reversed([*model.named_modules()]):  # outer modules last, so that they take precedence
            declaration = declaration_of(owner)
            for name, dim in declaration.input_dims.items():
                input_dim = -1 if declaration.logical_names[name][-1] == dim else -2
                self.declared[f"{path}.{name}".lstrip(".")] = Matrix(input_dim, declaration.fused_gates.get(name))
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                self.owners[parameter].append((owner, name))
        self.in_blocks = {parameter for block in list(blocks(model)) or [model] for parameter in block.parameters()}

    def choice(self, name: str, parameter: nn.Parameter) -> Choice:
        """Choose by the overrides, else by the first rule that applies. The reason is empty if none does."""
        shape, names = tuple(parameter.shape), self.names.get(name)
        dims: Sequence[object]  # which are not stacked
        if names is not None:
            dims = [dim for dim in names if dim not in STACKED]
        else:
            dims = shape[-1:] if name.endswith("bias") else [size for size in shape if size > 1]
        override = next((choice for pattern, choice in self.overrides.items() if fnmatchcase(name, pattern)), None)
        if override is not None:
            matrix, reason = None if override == "adamw" else override, "overrides"
        else:
            matrix, reason = self._by_rules(name, parameter, dims)
        return Choice(name, shape, matrix, reason, len(dims))

    def problem(self, choice: Choice) -> str | None:
        """Return why a choice is invalid, for messages; None if it is valid."""
        shape, names = choice.shape, self.names.get(choice.name)
        if choice.matrix is not None and choice.name in self.factors and len(shape) == 2:
            return (
                f"{choice.name} of shape {shape}, in which PEFT packs the factors of all experts; maxmoe.parallelize "
                "makes a stack of matrices of it, also on one rank"
            )
        described = "no logical names" if names is None else f"the logical names {names}"
        return None if choice.reason else f"{choice.name} of shape {shape} with {described}"

    def _by_rules(self, name: str, parameter: nn.Parameter, dims: Sequence[object]) -> tuple[Matrix | None, str]:
        """Choose by the logical names, or by the module that owns the parameter; `dims` are not stacked."""
        names, is_2d = self.names.get(name), parameter.dim() == 2
        named = "no names" if names is None else f"names {', '.join(dim or '-' for dim in names)}"
        if name in self.factors:
            return None, "low-rank factors of stacked matrices"
        if name in self.declared:
            return self.declared[name], named
        if len(dims) < 2:
            return None, f"{named}: a norm or a bias"
        if "vocab" in dims or self._is_in(parameter, nn.Embedding):
            return None, f"{named}: an embedding or a head"
        if None in dims:
            return None, f"{named}: a dim without a name, such as a router's"
        if names is None and parameter not in self.in_blocks:
            return None, f"{named}: outside of the blocks"
        if is_2d and self._is_in(parameter, nn.Linear):
            return Matrix(), f"{named}: nn.Linear"
        if names is not None:
            return None, ""
        if is_2d:
            return None, f"{named}: two dims, but not nn.Linear"
        for owner, attribute in self.owners[parameter]:
            is_transposed: object = getattr(owner, "is_transposed", None)
            if parameter.dim() == 3 and isinstance(is_transposed, bool):
                is_fused = "gate_up" in attribute and getattr(owner, "has_gate", True)
                layout: FusedGate = "concatenated" if getattr(owner, "is_concatenated", True) else "interleaved"
                matrix = Matrix(-2 if is_transposed else -1, layout if is_fused else None)
                return matrix, f"{named}: is_transposed of {type(owner).__name__}"
        return None, ""

    def _is_in(self, parameter: nn.Parameter, kind: type[nn.Module]) -> bool:
        """Return whether a module of this type owns the parameter."""
        return any(isinstance(owner, kind) for owner, _ in self.owners[parameter])
