"""The parameter groups of a model for `Muon`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from maxmoe.optim.choice import Choice, Override, choose
from maxmoe.text_table import terminal_width, text_table


class ParameterGroups(list[dict[str, Any]]):
    """What `parameter_groups` returns; as a string, a table of all choices, as wide as the terminal.

    Args:
        groups: for `Muon`.
        choices: one per parameter.
        frozen: the parameters that are in no group, as they are not trained.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], choices: Sequence[Choice], frozen: Sequence[str]) -> None:
        super().__init__(groups)
        self.choices, self.frozen = tuple(choices), tuple(frozen)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "optimizer", "matrices", "because of")]
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

    Logical names decide: matrices of blocks, and stacks of them, go to Muon; embeddings, heads, routers, norms and
    biases to AdamW, the last two without weight decay. Parameters without names go by the usual rule: the weights of
    `nn.Linear` in blocks go to Muon, and stacks in modules that say by `is_transposed` how they lie, as the experts of
    transformers do; other parameters of one or two dims go to AdamW. Blocks are the children of the outermost
    `nn.ModuleList`s, or the whole model if there are none. Frozen parameters are in no group.

    Args:
        model: before or after `maxmoe.parallelize`; make the optimizer after it.
        overrides: other choices, by path of the parameter or pattern with ``*``; the first that matches counts:
            "adamw", or the `Matrix` that says which dim is the input.
        adamw: options of the groups of AdamW, with the names of `torch.optim.AdamW`: lr, betas, eps, weight_decay.

    Returns:
        The groups, a list of dicts. `print` shows every choice and its reason.

    Raises:
        ValueError: for an override of no parameter, with the nearest; for parameters of more dims than their names
            explain.

    Example:
        ``Muon(parameter_groups(model, {"router.*": Matrix()}, adamw={"betas": (0.9, 0.95)}), lr=1e-3)``
    """
    choices = choose(model, overrides or {})
    parameters = dict(model.named_parameters())
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for choice in choices:
        options: dict[str, Any] = {"algorithm": choice.algorithm}
        if choice.matrix is not None:
            options |= choice.matrix._asdict()
        else:
            options |= {**(adamw or {}), **({"weight_decay": 0.0} if choice.num_dims < 2 else {})}
        key = choice.matrix, choice.matrix is None and choice.num_dims < 2
        group = groups.setdefault(key, {"params": [], **options})
        group["params"].append((choice.name, parameters[choice.name]))
    chosen = {choice.name for choice in choices}
    return ParameterGroups([*groups.values()], choices, [name for name in parameters if name not in chosen])
