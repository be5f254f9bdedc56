"""Moving tensors from one sharding to another, at stated points."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.experimental import local_map

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.partition_spec import PartitionSpec


def reshard(tensor: Tensor, sharding: NamedSharding) -> DTensor:
    """Move a tensor to a sharding: gathers, reduces, exchanges or slices, whatever it takes.

    Args:
        tensor: a DTensor on the mesh, partial sums included; or a plain tensor, whole and equal on every rank.
        sharding: where it goes.

    Returns:
        The same tensor there; gradients go the way back.

    Raises:
        ValueError: for a DTensor on another mesh, and as `NamedSharding.shard_shape`.
    """
    sharding.shard_shape(tensor.shape)
    device_mesh = sharding.mesh.device_mesh
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
    if tensor.device_mesh != device_mesh:
        raise ValueError(f"the tensor is on {tensor.device_mesh}, the sharding on {device_mesh}")
    return tensor.redistribute(placements=sharding.placements)


def shard_map(
    function: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    *,
    partial: Sequence[str] = (),
) -> Callable[..., Any]:
    """Run a function of plain tensors on every rank's part of DTensors.

    Inputs are resharded to their specs first. Over an axis that shards some argument, but not this one, the gradient
    of this one is the sum over the ranks.

    Args:
        function: takes and returns each rank's parts; its collectives, if any, are its own.
        mesh: of all tensors.
        in_specs: one per positional argument, None for what is not a DTensor.
        out_specs: one for a single output, a tuple for several.
        partial: axes over which the outputs are sums that nobody has taken yet; `reshard` takes them.

    Returns:
        The function of DTensors.

    Raises:
        ValueError: for an axis that shards an input and neither shards the outputs nor is `partial`: a sum taken
            inside of `function` would count gradients once per rank.

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
        laid = NamedSharding(mesh, spec).placements
        return [
            Partial() if axis in sums - owned else placement
            for axis, placement in zip(mesh.device_mesh.mesh_dim_names or (), laid, strict=True)
        ]

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
