"""What a state dict must have to be loaded: the parameters, and the state that each algorithm keeps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from maxmoe.config import nearest

STATES = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}


def check_state_dict(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Compare a state dict with the parameter groups that it is for.

    Args:
        groups: of the optimizer.
        state_dict: of the model that was saved.

    Raises:
        ValueError: for other groups, parameters, shapes or states, with the first name that differs.
    """
    saved_groups = state_dict["param_groups"]
    foreign = next((group for group in saved_groups if "algorithm" not in group), None)
    if foreign is not None:
        raise ValueError(
            f"the state dict must be of maxmoe.optim.Muon, got that of an optimizer with the options "
            f"{sorted(set(foreign) - {'params', 'param_names'})}: Muon cannot go on from the state of AdamW, nor AdamW "
            "from that of Muon; load the model alone"
        )
    ours, theirs = _names(groups), _names(saved_groups)
    if None not in (*ours, *theirs):
        for name in (*theirs, *ours):
            if name not in ours or name not in theirs:
                where, others = ("the optimizer", ours) if name not in ours else ("the state dict", theirs)
                raise ValueError(f"{where} has no parameter {name}{nearest(str(name), [*map(str, others)])}")
    counts = [[(group["algorithm"], len(group["params"])) for group in found] for found in (groups, saved_groups)]
    if counts[0] != counts[1] or ours != theirs:
        raise ValueError(
            f"the groups of the optimizer and of the state dict must hold the same parameters: algorithms and numbers "
            f"of parameters are {counts[0]} and {counts[1]}"
        )
    for name, algorithm, parameter, state in _states(groups, state_dict):
        if state and set(state) != STATES[algorithm]:
            raise ValueError(
                f"{name} is for {algorithm}, whose state is {sorted(STATES[algorithm])}, got {sorted(state)}"
            )
        for key, value in state.items():
            if key != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of {name} must have its shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
                )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str | None]:
    return [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]


def _states(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[str, str, Tensor, Mapping[str, Any]]]:
    """Name, algorithm and parameter of the optimizer, each with the state that is saved for it."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        names = group.get("param_names", saved["params"])
        for name, parameter, key in zip(names, group["params"], saved["params"], strict=True):
            yield f"the parameter {name}", group["algorithm"], parameter, state_dict["state"].get(key, {})
