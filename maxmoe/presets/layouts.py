"""How the weights of a published layer are named and arranged, and which of our parameters they hold.

An `Entry` is one tensor of theirs, a `Layout` all tensors of a layer. Both directions go through the same views.
E experts, D hidden_size, F intermediate_size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """A tensor of a family, which holds one of our parameters or two side by side.

    Args:
        key: its name within the layer; with "{expert}" in it, there is one tensor for each expert.
        names: of our parameters; two are gate and up, next to each other along F.
        transposed: the last two dims are [out, in], as in `torch.nn.Linear`; ours are [in, out].
        interleaved: gate and up alternate along F, otherwise all of the gate comes first.
        unsqueezed: they have a first dim of one that we have not.
    """

    key: str
    names: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    unsqueezed: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether it belongs to one or all of the routed experts."""
        return self.names[0].startswith("experts.")

    @property
    def is_stack(self) -> bool:
        """Whether its first dim is that of the experts."""
        return self.is_of_experts and "{expert}" not in self.key

    def shape(self, parameter: torch.Size) -> torch.Size:
        """Shape of the tensor for the shape of each of our parameters."""
        *leading, width = parameter
        shape = [*leading, width * len(self.names)]
        if self.transposed:
            shape[-2:] = shape[-1], shape[-2]
        return torch.Size([1, *shape] if self.unsqueezed else shape)

    def views(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Views of the tensor, or of one expert's part of it, with the dims of our parameters."""
        if self.unsqueezed:
            tensor = tensor.squeeze(0)
        if self.transposed:
            tensor = tensor.mT
        count = len(self.names)
        if self.interleaved:
            return tuple(tensor[..., place::count] for place in range(count))
        return tensor.chunk(count, dim=-1)

    def join(self, parameters: Sequence[Tensor]) -> Tensor:
        """A new tensor that holds our parameters."""
        tensor = parameters[0].new_empty(self.shape(parameters[0].shape))
        for view, parameter in zip(self.views(tensor), parameters, strict=True):
            view.copy_(parameter)
        return tensor


class Held(NamedTuple):
    """What a tensor of theirs holds: our parameters, whole or those of one expert, by the rule of the entry."""

    entry: Entry
    parameters: list[Tensor]

    @property
    def shape(self) -> torch.Size:
        """Of their tensor."""
        return self.entry.shape(self.parameters[0].shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a layer.

    Args:
        module: the layer's name in a block of the decoder.
        entries: all tensors.
    """

    module: str
    entries: tuple[Entry, ...]

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Held]:
        """Names of the tensors of a layer, and what they hold.

        Args:
            state: our parameters and buffers, by the names of the state dict.

        Returns:
            By the names within the layer.

        Raises:
            ValueError: if our layer has other parameters.
        """
        names = {name for entry in self.entries for name in entry.names}
        if names != set(state):
            listed = [", ".join(sorted(some)) or "nothing" for some in (names - set(state), set(state) - names)]
            raise ValueError(
                f"the layer must have the parameters of the family: it lacks {listed[0]}, has no use for {listed[1]}"
            )
        tensors = {}
        for entry in self.entries:
            parameters = [state[name] for name in entry.names]
            if "{expert}" not in entry.key:
                tensors[entry.key] = Held(entry, parameters)
                continue
            for expert in range(len(parameters[0])):
                held = Held(entry, [parameter[expert] for parameter in parameters])
                tensors[entry.key.format(expert=expert)] = held
        return tensors


def check_tensors(where: str, found: Mapping[str, Sequence[int]], expected: Mapping[str, Held]) -> None:
    """Compare the names and shapes of a layer's tensors with those that there must be.

    Args:
        where: what was found there, for the message.
        found: shapes by name.
        expected: from `Layout.tensors`.

    Raises:
        ValueError: if a tensor is missing, is one too many or has another shape.
    """
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in expected]
    if missing or extra:
        # Scales belong to quantised weights.
        hint = "; quantised weights must be dequantised first" if any("scale" in key for key in extra) else ""
        raise ValueError(f"{where}: missing {listed(missing)}, not known {listed(extra)}{hint}")
    for key, held in expected.items():
        if tuple(found[key]) != tuple(held.shape):
            raise ValueError(f"{where}: {key} must have shape {tuple(held.shape)}, got {tuple(found[key])}")


def listed(keys: Sequence[str]) -> str:
    """The first of the keys, for a message: a layer may have thousands."""
    most = 4
    return (", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")) or "nothing"


def router(module: str, correction_bias: str | None = None) -> tuple[Entry, ...]:
    """The router's matrix, and the bias of the selection."""
    weight = Entry(f"{module}.weight", ("router.weight",))
    if correction_bias is None:
        return (weight,)
    return (weight, Entry(correction_bias, ("router.score_correction_bias",)))


def shared(module: str) -> tuple[Entry, ...]:
    """The matrices of the shared expert."""
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(Entry(f"{module}.{name}.weight", (f"shared_experts.{name}",), transposed=True) for name in names)


def stacked(*, transposed: bool = True, interleaved: bool = False) -> tuple[Entry, ...]:
    """All routed experts in one tensor for gate and up, one for down, as transformers has them in memory."""
    return (
        Entry("experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj"), transposed, interleaved),
        Entry("experts.down_proj", ("experts.down_proj",), transposed),
    )


def per_expert(gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Three matrices for each routed expert, as most checkpoints have them."""
    names = {gate: "experts.gate_proj", up: "experts.up_proj", down: "experts.down_proj"}
    return tuple(
        Entry(f"experts.{{expert}}.{theirs}.weight", (ours,), transposed=True) for theirs, ours in names.items()
    )
