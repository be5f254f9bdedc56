"""What a module declares for running on several processes and for planning such a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

# Of parameters, by their path within the module: the logical name of each dim, None for a dim that is never sharded.
LogicalNames: TypeAlias = Mapping[str, tuple[str | None, ...]]

# How gate and up lie in one parameter, along the dim of their outputs: all of the gate first, or in turn.
FusedGate: TypeAlias = Literal["concatenated", "interleaved"]

# The logical names of the dims along the batch and along the sequence.
TOKEN_DIMS = ("activation_batch", "activation_length")


def gate_up_slices(size: int, layout: FusedGate) -> tuple[slice, slice]:
    """Return the slices of gate and up along a dim of `size` elements that holds both."""
    if layout == "interleaved":
        return slice(0, size, 2), slice(1, size, 2)
    half = (size + 1) // 2  # a shard of the dim may have an odd size; this is where torch.chunk splits it
    return slice(0, half), slice(half, size)


class SavedTensor(NamedTuple):
    """A tensor that autograd saves in the forward of a module for its backward.

    Args:
        shape: over all ranks.
        names: the logical name of each dim.
        dtype: None for that of the parameters.
        is_kept: whether it is kept from the forward to the backward; otherwise it is computed again, see
            `maxmoe.set_recompute`.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    dtype: torch.dtype | None = None
    is_kept: bool = True


@dataclass(frozen=True)
class ResidualStream:
    """The hidden states ``(..., D)`` that modules read, and add to.

    Where the rules shard `activation_embed`, every rank holds a part of D: readers get it all-gathered, and of what
    writers return each rank keeps its part.

    Args:
        hidden_size: D.
        parts: pairs of paths of children: the reader, which takes hidden states as its first argument, and the writer,
            which computes what is added to them from the output of the reader. None where the stream begins or ends.
    """

    hidden_size: int
    parts: tuple[tuple[str | None, str | None], ...]


SavedTensors: TypeAlias = Callable[[int, int], Mapping[str, SavedTensor]]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What `maxmoe.parallelize` and `maxmoe.planning` must know of a module, in its attribute `declaration`.

    A module without the attribute is run as any other: its parameters are replicated and reported by `explain`, unless
    a module around it names them, and they are gathered by the FSDP unit around it, or else by itself::

        class FeedForward(nn.Module):
            @property
            def declaration(self) -> Declaration:
                return Declaration(
                    logical_names={"up_proj.weight": ("mlp", "embed"), "down_proj.weight": ("embed", "mlp")},
                    tensor_parallel_dims={"mlp": self.up_proj.out_features},
                )

    Args:
        logical_names: of the parameters of the module and of its children, by their path within the module. Those of
            an outer module take precedence over those of an inner one.
        input_dims: of parameters that are matrices, or stacks of matrices along their first dims: the logical name of
            the dim that is multiplied with the input, one of the last two; the other one is that of the outputs. It is
            known of `nn.Linear`. `maxmoe.optim.Muon` needs it.
        fused_gates: of those in `input_dims` in which the matrices of gate and up are fused: how they lie.
        fsdp_unit: whether the parameters of the module and of its descendants, other FSDP units excepted, are
            gathered before the forward of the module and freed after it. Where it is False, each module gathers the
            parameters that it owns when it runs itself. A module that reads parameters of its children outside of
            their forward must be a FSDP unit; a `maxmoe.nn.Checkpointed` module is one.
        tensor_parallel_dims: logical names of dims that the ranks along an axis may compute in parts, with the number
            of parts that must stay whole (heads, say): tensor parallelism, over the axes on which the rules put both
            the weights and the activations of all these dims. The output of the module must be one tensor, linear in
            the last of these dims, so that the partial outputs can be summed. Makes the module a FSDP unit.
        added_to_output: paths of parameters of a tensor-parallel module that are added to its output, such as the bias
            of its last projection: only one of the ranks may add them.
        uses_token_group: whether `parallelize` sets the attribute `token_group` of the module; see `TokenGroup`.
        needs_whole_sequences: whether the output depends on tokens of the sequence on other ranks that the module does
            not ask its token group for. Rules that shard sequences are an error then.
        residual_stream: which children read hidden states, and which return what is added to them.
        saved_tensors: given the batch size and the sequence length over all ranks, the tensors that the module itself
            saves for the backward, its input among them, by name, and those that it recomputes; those of its children
            are theirs.
    """

    logical_names: LogicalNames = field(default_factory=dict)
    input_dims: Mapping[str, str] = field(default_factory=dict)
    fused_gates: Mapping[str, FusedGate] = field(default_factory=dict)
    fsdp_unit: bool = False
    tensor_parallel_dims: Mapping[str, int] = field(default_factory=dict)
    added_to_output: tuple[str, ...] = ()
    uses_token_group: bool = False
    needs_whole_sequences: bool = False
    residual_stream: ResidualStream | None = None
    saved_tensors: SavedTensors | None = None

    def __post_init__(self) -> None:
        for name, dim in self.input_dims.items():
            names = self.logical_names.get(name, ())
            if dim not in names[-2:] or len(names) < 2:
                raise ValueError(
                    f"input_dims must be one of the last two logical names of a parameter, got {name!r}: {dim!r} of "
                    f"{tuple(names)}"
                )
        for name, layout in self.fused_gates.items():
            if name not in self.input_dims or layout not in get_args(FusedGate):
                raise ValueError(
                    f"fused_gates must be 'concatenated' or 'interleaved', of parameters in input_dims, got {name!r}: "
                    f"{layout!r}"
                )
        for name, parts in self.tensor_parallel_dims.items():
            if parts < 1:
                raise ValueError(f"tensor_parallel_dims must be positive, got {name!r}: {parts}")


NOTHING = Declaration()


def declaration_of(module: nn.Module) -> Declaration:
    """Return what a module declares.

    Args:
        module: any module.

    Returns:
        Its `declaration`; an empty one if it has none.

    Raises:
        TypeError: for an attribute of another type.
    """
    declaration: object = getattr(module, "declaration", NOTHING)
    if not isinstance(declaration, Declaration):
        raise TypeError(
            f"{type(module).__name__}.declaration must be a maxmoe.parallel.Declaration, got {type(declaration)}"
        )
    return declaration
