"""Names and layouts of the weights of published layers, and the maxmoe parameters that they contain.

An `Entry` describes one published tensor, a `Layout` all published tensors of a layer. Conversions in both directions
use the same views. E experts, D hidden_size, F intermediate_size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from maxmoe.quantization import QuantizedStack
from maxmoe.text_table import listed

Weight = TypeVar("Weight", Tensor, QuantizedStack)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Entry:
    """A published tensor, which contains one maxmoe parameter, or gate and up fused along F.

    Args:
        key: name of the tensor in the layer. If it contains "{expert}", there is one tensor per expert.
        names: names of the maxmoe parameters: one name, or the names of gate and up.
        transposed: whether the last two dims are [out, in], as in `torch.nn.Linear`; maxmoe has [in, out].
        interleaved: whether gate and up alternate along F; otherwise the whole gate comes first.
        unsqueezed: whether the published tensor has an additional first dim of size one.
        has_unused_matrices: whether the stack of a block in memory has further matrices at its end, which the block
            does not use.
        is_optional: whether layers without the parameters lack the tensor; they have all others.
        is_flat: whether the expert dim of the stack and the dim after it are one dim.
    """

    key: str
    names: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    unsqueezed: bool = False
    has_unused_matrices: bool = False
    is_optional: bool = False
    is_flat: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether the tensor contains parameters with an expert dim, which parameters of submodules do not have."""
        return self.names[0].rpartition(".")[0] == "experts"

    @property
    def is_stack(self) -> bool:
        """Whether the first dim of the tensor is the expert dim."""
        return self.is_of_experts and "{expert}" not in self.key

    def shape(self, parameter: torch.Size) -> torch.Size:
        """Return the shape of the published tensor, given the shape of each maxmoe parameter, before it is flat."""
        *leading, width = parameter
        shape = [*leading, width * len(self.names)]
        if self.transposed:
            shape[-2:] = shape[-1], shape[-2]
        return torch.Size([1, *shape] if self.unsqueezed else shape)

    def views(self, tensor: Weight) -> tuple[Weight, ...]:
        """Return views of the published tensor, or of one expert's slice, with the dims of the maxmoe parameters."""
        if self.unsqueezed:
            tensor = tensor[0]
        if self.transposed:
            tensor = tensor.mT
        count = len(self.names)
        if count == 1:
            return (tensor,)
        if self.interleaved:
            return tuple(tensor[..., place::count] for place in range(count))
        width = tensor.shape[-1] // count
        return tuple(tensor[..., place * width : (place + 1) * width] for place in range(count))

    def join(self, parameters: Sequence[Weight]) -> Weight:
        """Return a new published tensor that contains the maxmoe parameters.

        Raises a ValueError with its name for quantized parameters whose blocks it would cut.
        """
        like = parameters[0].mT if self.transposed else parameters[0]  # quantized weights keep their memory layout
        tensor = like.new_empty(self.shape(parameters[0].shape))
        try:
            for view, parameter in zip(self.views(tensor), parameters, strict=True):
                view.copy_(parameter)
        except ValueError as error:
            raise ValueError(f"{self.key}: {error}") from error
        if not self.is_flat or tensor.dim() < 3:
            return tensor
        if isinstance(tensor, QuantizedStack):
            raise ValueError(f"{self.key}: one matrix of all experts cannot be quantized as {tensor.format}")
        return tensor.flatten(0, 1)


class Held(NamedTuple):
    """Entry of a published tensor, and the maxmoe parameters that the tensor contains, whole or of one expert."""

    entry: Entry
    parameters: list[Any]

    @property
    def shape(self) -> torch.Size:
        """Shape of the published tensor."""
        shape = self.entry.shape(self.parameters[0].shape)
        return torch.Size([shape[0] * shape[1], *shape[2:]]) if self.is_flat else shape

    @property
    def is_flat(self) -> bool:
        """Whether the tensor has the matrices of all experts in one."""
        return self.entry.is_flat and self.parameters[0].dim() == 3

    def views(self, tensor: Any) -> tuple[Any, ...]:
        """Return views of the published tensor with the dims of the maxmoe parameters."""
        return self.entry.views(tensor.unflatten(0, (self.parameters[0].shape[0], -1)) if self.is_flat else tensor)


@dataclass(frozen=True)
class Layout:
    """Layout of all published tensors of a layer."""

    module: str  # name of the layer in a block of the decoder; "" if the tensors have no common prefix
    entries: tuple[Entry, ...]

    @property
    def prefix(self) -> str:
        """Common prefix of the names of the tensors in a block of the decoder."""
        return f"{self.module}." if self.module else ""

    def has(self, name: str) -> bool:
        """Return whether a tensor belongs to the layer, given its name in a block of the decoder."""
        modules = {entry.key.partition(".")[0] for entry in self.entries}
        return name.startswith(self.prefix) and (bool(self.module) or name.partition(".")[0] in modules)

    def tensors(self, state: Mapping[str, Any]) -> dict[str, Held]:
        """Return the maxmoe parameters that each published tensor contains, by the name of the tensor in the layer.

        Raises if `state`, the parameters and buffers of the maxmoe layer, has other names than the layout.
        """
        entries = [entry for entry in self.entries if not entry.is_optional or state.keys() & entry.names]
        names = {name for entry in entries for name in entry.names}
        if names != set(state):
            lacks, unused = (", ".join(sorted(some)) or "nothing" for some in (names - set(state), set(state) - names))
            raise ValueError(
                f"the layer must have the parameters of the family: it lacks {lacks}, has no use for {unused}"
            )
        tensors = {}
        for entry in entries:
            parameters = [state[name] for name in entry.names]
            if "{expert}" not in entry.key:
                tensors[entry.key] = Held(entry, parameters)
                continue
            for expert in range(parameters[0].shape[0]):
                held = Held(entry, [parameter[expert] for parameter in parameters])
                tensors[entry.key.format(expert=expert)] = held
        return tensors


def check_tensors(where: str, found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> None:
    """Raise unless the shapes `found`, by name, equal the shapes `expected`; `where` begins the message."""
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in expected]
    if missing or extra:
        # Unknown tensors with a scale in their name are from quantised weights.
        is_quantized = any("scale" in key for key in extra)
        remedy = "dequantised first, or read into experts that maxmoe.quantize_experts has quantized"
        hint = f"; quantised weights must be {remedy}" if is_quantized else ""
        raise ValueError(f"{where}: missing {listed(missing)}, not known {listed(extra)}{hint}")
    for key, shape in expected.items():
        if tuple(found[key]) != tuple(shape):
            raise ValueError(f"{where}: {key} must have shape {tuple(shape)}, got {tuple(found[key])}")


def router(module: str, correction_bias: str | None = None) -> tuple[Entry, ...]:
    """Return the entries of the router weight and of the correction bias if the family has one."""
    weight = Entry(f"{module}.weight", ("router.weight",))
    if correction_bias is None:
        return (weight,)
    return (weight, Entry(correction_bias, ("router.score_correction_bias",)))


def shared(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Entry, ...]:
    """Return the entries of the shared expert."""
    return linears(module, "shared_experts", (gate, up, down))


def within(module: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return entries whose tensors are in a module of the layer."""
    return tuple(replace(entry, key=f"{module}.{entry.key}") for entry in entries)


def stacked(*, gated: bool = True, transposed: bool = True, interleaved: bool = False) -> tuple[Entry, ...]:
    """Return entries of one tensor for gate and up of all routed experts and one for down, as in transformers."""
    up = Entry("experts.up_proj", ("experts.up_proj",), transposed)
    if gated:
        up = Entry("experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj"), transposed, interleaved)
    return up, Entry("experts.down_proj", ("experts.down_proj",), transposed)


def per_expert(gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Return entries of one gate, up and down matrix per routed expert, the most common checkpoint layout."""
    return linears("experts.{expert}", "experts", (gate, up, down))


def linears(module: str, ours: str, names: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries of the weights of three `nn.Linear`: gate, up and down."""
    places = zip(names, PROJECTIONS, strict=True)
    return tuple(Entry(f"{module}.{theirs}.weight", (f"{ours}.{name}",), transposed=True) for theirs, name in places)


# Entries that several families have.
GATE = router("gate")
GATE_BIASED = router("gate", correction_bias="gate.e_score_correction_bias")
GATE_BIASED_OUTSIDE = router("gate", correction_bias="e_score_correction_bias")
W123 = per_expert("w1", "w3", "w2")
PROJ = per_expert(*PROJECTIONS)
SHARED = shared("shared_experts")
OPTIONAL_SHARED = tuple(replace(entry, is_optional=True) for entry in SHARED)  # models without shared experts too
TWO_LINEARS = (
    Entry("input_linear.weight", ("experts.gate_proj", "experts.up_proj"), transposed=True),
    Entry("output_linear.weight", ("experts.down_proj",), transposed=True),
)
