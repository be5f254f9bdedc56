"""Functions of local tensors, applied to the shards of DTensors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Placement
from torch.distributed.tensor.experimental import local_map

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec


def shard_map(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    *,
    partial: Sequence[str] = (),
) -> Callable[..., Any]:
    """Turn a function of local tensors into a function of DTensors.

    Inputs are redistributed to their specs first. The gradient of an input is summed over the axes that shard the
    outputs, or over which these are partial, and that do not shard the input.

    Args:
        function: function that takes and returns this rank's shards; it may call collectives.
        mesh: mesh of all inputs and outputs.
        in_specs: partition spec of each positional argument, None for an argument that is not a DTensor.
        out_specs: partition spec of the output, or a tuple of specs for several outputs.
        partial: axes over which the outputs are unreduced sums; `redistribute` reduces them.

    Returns:
        Function that takes and returns DTensors.

    Raises:
        ValueError: for an axis that shards an input and neither shards the outputs nor is `partial`: the gradient of
            an all-reduce inside `function` would count once per rank.

    Source: `jax.shard_map`, over `torch.distributed.tensor.experimental.local_map`.
    """
    outputs = out_specs if not isinstance(out_specs, PartitionSpec) else (out_specs,)
    varying = {*partial, *(axis for spec in outputs for axes in spec for axis in axes)}
    for number, spec in enumerate(in_specs):
        lost = {axis for axes in spec or () for axis in axes if mesh.size(axis) > 1} - varying
        if lost:
            raise ValueError(
                f"axis {min(lost)!r} shards input {number} ({spec!r}) and no output: return the unreduced sum and "
                f"name the axis in partial, got partial={tuple(partial)!r}"
            )

    def placements(spec: PartitionSpec, sums: set[str]) -> list[Placement]:
        owned = {axis for axes in spec for axis in axes}
        partial_axes = tuple(axis for axis in mesh.sizes if axis in sums - owned)
        return [*NamedSharding(mesh, spec, partial_axes).placements]  # local_map reads a tuple as several outputs

    out_placements = tuple(placements(spec, set(partial)) for spec in outputs)
    mapped: Callable[..., Any] = local_map(
        function,
        out_placements=out_placements[0] if isinstance(out_specs, PartitionSpec) else out_placements,
        in_placements=tuple(None if spec is None else placements(spec, set()) for spec in in_specs),
        in_grad_placements=tuple(None if spec is None else placements(spec, varying) for spec in in_specs),
        device_mesh=mesh.device_mesh,
        redistribute_inputs=True,
    )
    return mapped
