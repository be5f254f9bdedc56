"""Initialization of the parameters of a sharded module."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import TorchDispatchMode


def reset_parameters(module: nn.Module) -> None:
    """Call `module.reset_parameters` such that the values equal the values that a single process would draw.

    DTensor draws each shard from the generator of its rank: with equal seeds, shards repeat each other; with different
    seeds, the copies of a replicated parameter differ. Here, each rank draws the global parameter and keeps its shard,
    one parameter at a time. All ranks must have the same seed.

    Args:
        module: sharded module with a method `reset_parameters`, with allocated parameters (`to_empty`).
    """
    with _DrawnWhole():  # type: ignore[no-untyped-call]
        module.reset_parameters()  # type: ignore[operator]


class _DrawnWhole(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which an in-place random operator on a DTensor draws the global tensor and keeps the local shard."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor, options = args[0] if args else None, kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not is_random or not isinstance(tensor, DTensor):
            return func(*args, **options)
        local = tensor.to_local()
        whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        func(whole, *args[1:], **options)
        mesh = tensor.device_mesh
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        local.copy_(replicated.redistribute(placements=tensor.placements).to_local())
        return tensor
