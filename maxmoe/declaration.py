"""Declarations of modules, which `maxmoe.parallelize` and `maxmoe.costs` read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

# For each parameter, by its path in the module, the logical name of each dim; None for a dim that is never sharded.
LogicalNames: TypeAlias = Mapping[str, tuple[str | None, ...]]

# Layout of gate and up in a fused parameter, along the output dim: the whole gate first, or alternating.
FusedGate: TypeAlias = Literal["concatenated", "interleaved"]

# Logical names of the batch dim and of the sequence dim of activations.
TOKEN_DIMS = ("activation_batch", "activation_length")
# Logical names of the dims before the channels of activations inside the experts.
EXPERT_TOKEN_DIMS = ("activation_batch_moe", "activation_length_moe", "activation_exp")


def gate_up_slices(size: int, layout: FusedGate) -> tuple[slice, slice]:
    """Return the slices of gate and up along a fused dim of `size` elements."""
    if layout == "interleaved":
        return slice(0, size, 2), slice(1, size, 2)
    half = (size + 1) // 2  # as torch.chunk splits; a shard of the dim may have an odd size
    return slice(0, half), slice(half, size)


@dataclass(frozen=True)
class ResidualStream:
    """Residual stream: hidden states ``(..., D)`` that modules read and add to.

    If the rules shard `activation_embed`, each rank holds a shard of D. The stream is all-gathered before a reader, and
    the outputs of a writer are sharded again.

    Args:
        hidden_size: D, hidden size of the stream.
        parts: pairs of paths of children. The first is the reader, which takes hidden states as its first argument. The
            second is the writer, whose output is computed from the output of the reader and added to the stream. The
            reader is None where the stream begins, the writer is None where it ends.
    """

    hidden_size: int
    parts: tuple[tuple[str | None, str | None], ...]


@dataclass(frozen=True)
class PipelineParts:
    """Parts of a module by which `maxmoe.pipeline` cuts it into stages: first part, list of blocks, last part.

    In a stage without the first part, its modules are replaced by `Absent`, which returns its input, and the forward of
    the module gets the hidden states of the previous stage as its first argument. In a stage without the last part, its
    modules are replaced likewise, so that the forward returns the hidden states after the last block, as a tensor or as
    the first tensor of its output. The forward passes the hidden states from each part to the next one and computes
    nothing with them in between. Blocks take them as their first argument and keep their shape and dtype. Modules
    outside of the parts are in every stage, and must have no parameters.

    Args:
        first: paths of the modules before the blocks, such as the embedding.
        blocks: path of the `nn.ModuleList` of blocks. The list has the same length in every stage, so that a forward
            may number its blocks; the blocks of other stages are replaced by `Absent`.
        last: paths of the modules after the blocks, such as the last norm and the output projection.
        absent_block_output: function that makes what a block returns from its hidden states, if it returns more than a
            tensor, such as ``lambda x: (x, None)``; called in the place of blocks of other stages.
        removes_blocks: whether blocks of other stages are removed from the list instead, for a forward that adds what a
            block returns, as in ``x = x + block(x)``. Such a forward must not number its blocks.
    """

    first: tuple[str, ...]
    blocks: str
    last: tuple[str, ...]
    absent_block_output: Callable[[Any], Any] | None = None
    removes_blocks: bool = False


class Absent(nn.Module):
    """Module in the place of a part of a model that another pipeline stage has. It returns its first argument.

    Args:
        output: function that makes what the part returns from its first argument; None for the argument itself.
    """

    def __init__(self, output: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._output = output

    def forward(self, x: Any, *_arguments: Any, **_options: Any) -> Any:
        """Return the first argument."""
        return x if self._output is None else self._output(x)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Properties of a module that `maxmoe.parallelize` and `maxmoe.costs` read from its attribute `declaration`.

    Modules without a declaration work too. Their parameters are replicated, and listed by `explain`, unless an outer
    module declares their names. They are gathered by the FSDP unit around the module, or by the module itself if there
    is none::

        class FeedForward(nn.Module):
            @property
            def declaration(self) -> Declaration:
                return Declaration(
                    logical_names={"up_proj.weight": ("mlp", "embed"), "down_proj.weight": ("embed", "mlp")},
                    tensor_parallel_dims={"mlp": self.up_proj.out_features},
                )

    Args:
        logical_names: logical names of the dims of parameters of the module and its children, by their path in the
            module. Names that an outer module declares take precedence.
        input_dims: logical name of the input dim of matrices or stacks of matrices, by path. It is one of the last two
            dims; the other one is the output dim. Not needed for `nn.Linear`. `maxmoe.optim.Muon` reads it.
        fused_gates: layout of gate and up in parameters of `input_dims` that fuse them, by path.
        fsdp_unit: whether the parameters of the module and its descendants, except other FSDP units, are gathered
            before the forward of the module and freed after it. If False, each module gathers its own parameters when
            it runs, and the parameters of children without a forward, such as a `nn.ParameterList`. A module that reads
            parameters of its other children outside of their forward must be a FSDP unit, as `nn.MultiheadAttention`
            is without a declaration. A `maxmoe.nn.Checkpointed` module always is one.
        tensor_parallel_dims: logical names of dims that may be computed in parts by the ranks along an axis, with the
            number of parts that cannot be split further, such as heads. The tensor-parallel axes are those to which
            the rules map both weights and activations of all these dims. The output of the module must be one tensor,
            linear in the last of these dims, so that partial outputs can be summed. Makes the module a FSDP unit.
        added_to_output: paths of parameters of a tensor-parallel module that are added to its output, such as the bias
            of the last projection. Only one rank adds them to its partial output.
        unsaved_parameters: paths of parameters that the backward does not read, such as a table that is indexed or a
            bias that is added. A FSDP unit gathers them for the forward alone. Not needed for `nn.Embedding` and the
            bias of `nn.Linear` that gather their own parameters.
        needs_whole_sequences: whether the output of a token depends on other tokens of its sequence that the module
            does not gather with its token group; see `TokenGroupAttribute`. Rules that shard sequences then raise an
            error.
        max_sequence_length: largest number of tokens of a sequence that the forward takes; None for any number.
            `maxmoe.costs` raises an error for more.
        residual_stream: children that read and write the residual stream.
        pipeline_parts: parts of the module by which `maxmoe.pipeline` cuts it; None for a module that cannot be cut.
    """

    logical_names: LogicalNames = field(default_factory=dict)
    input_dims: Mapping[str, str] = field(default_factory=dict)
    fused_gates: Mapping[str, FusedGate] = field(default_factory=dict)
    fsdp_unit: bool = False
    tensor_parallel_dims: Mapping[str, int] = field(default_factory=dict)
    added_to_output: tuple[str, ...] = ()
    unsaved_parameters: tuple[str, ...] = ()
    needs_whole_sequences: bool = False
    max_sequence_length: int | None = None
    residual_stream: ResidualStream | None = None
    pipeline_parts: PipelineParts | None = None

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
    """Return the declaration of a module, or an empty one if the module has none.

    A wrapper such as `PeftModel` forwards attributes to the module that it wraps; the declaration of that module is not
    its own.
    """
    is_declared = "declaration" in vars(module) or hasattr(type(module), "declaration")
    declaration: object = module.declaration if is_declared else NOTHING
    if not isinstance(declaration, Declaration):
        raise TypeError(
            f"{type(module).__name__}.declaration must be a maxmoe.parallel.Declaration, got {type(declaration)}"
        )
    return declaration


Finder: TypeAlias = Callable[[nn.Module], Mapping[str, bool]]

# Functions that know the modules of other libraries.
_finders: list[Finder] = []


def finds_expert_matrices(finder: Finder) -> None:
    """Register `expert_matrices` of modules of another library; it returns an empty mapping for all other modules."""
    _finders.append(finder)


def expert_matrices(module: Any) -> Mapping[str, bool]:
    """Return True for each stack ``(L, in, out)`` of a module, False for each stack ``(L, out, in)``, by name.

    Modules of this library have a method `expert_matrices`.
    """
    # The type is asked, because PEFT's wrappers forward attributes to the module that they wrap.
    if hasattr(type(module), "expert_matrices"):
        found: Mapping[str, bool] = module.expert_matrices()
        return found
    return next((matrices for finder in _finders if (matrices := finder(module))), {})
