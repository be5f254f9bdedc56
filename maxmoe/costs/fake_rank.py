"""One rank of a mesh in this process, with tensors that have shapes and no values, except integers.

Floating-point tensors are fake tensors. Integers and booleans are computed, so that a step has its real ragged plans,
row counts, splits and moves of experts. Where values would choose integers, as in a router, all experts get equally
many tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe._torch import (
    PLAIN_TENSORS,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    shapes_apart_from_modes,
    tree_map,
    without_dispatch_modes,
    without_log_of_fake_tensors,
)
from maxmoe._torch.copies import replace_tensors
from maxmoe._torch.fake_world import fake_world
from maxmoe.sharding.mesh import Mesh

# Dtypes of ids, counts and masks. The codes of quantized weights have narrower ones.
COMPUTED = (torch.int64, torch.int32, torch.bool)


@contextmanager
def fake_rank(sizes: dict[str, int], hot_share: float = 0.0) -> Iterator[tuple[Mesh, AbstractContextManager[None]]]:
    """Make this process rank 0 of a mesh without other ranks in the context.

    Args:
        sizes: number of ranks along each axis of the mesh.
        hot_share: share of the slots that choose the first expert; the others are distributed equally.

    Yields:
        The mesh, and a context in which tensors are fake.
    """
    planned = Mesh.planned(sizes)
    with fake_world(planned.num_ranks):
        yield Mesh(planned.sizes), _fake_tensors(hot_share)


@contextmanager
def _fake_tensors(hot_share: float) -> Iterator[None]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with shapes_apart_from_modes(), without_log_of_fake_tensors(), fake, _ComputedIntegers(fake, hot_share):
        yield


def allocate(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module on the meta device by fake tensors, with gradients."""
    replace_tensors(module, partial(torch.zeros_like, device="cpu"))  # zeros, because integers are computed
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts, which operators take and return. Faster than `tree_leaves`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


class _ComputedIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes operators whose arguments and results are integers, in a mode of fake tensors around it."""

    def __init__(self, fake: Any, hot_share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._hot_share = fake, hot_share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        options = kwargs or {}
        if not PLAIN_TENSORS.issuperset(types):
            return NotImplemented
        if func is torch.ops.aten.cat.out and isinstance(options["out"], FakeTensor):
            return options["out"]  # FSDP2 joins the parts of all ranks, which takes long to check one by one
        if func is torch.ops.maxmoe.route.default:
            weights, experts, probabilities = func(*args, **options)
            return weights, self._chosen(experts.shape, probabilities.shape[-1]), probabilities
        if func is torch.ops.aten.topk.default:
            values, indices = func(*args, **options)
            return values, self._chosen(indices.shape, args[0].shape[-1])
        tensors = tensors_in((args, options))
        if any(isinstance(tensor, FakeTensor) or tensor.dtype not in COMPUTED for tensor in tensors):
            return func(*args, **options)
        if not tensors:  # it makes a tensor, whose dtype a fake one tells
            result = func(*args, **options)
            if not all(tensor.dtype in COMPUTED for tensor in tensors_in(result)):
                return result
        with without_dispatch_modes():
            result = func(*args, **options)
        return tree_map(self._without_values, result)

    def _without_values(self, value: Any) -> Any:
        return self._fake.from_tensor(value) if isinstance(value, Tensor) and value.dtype not in COMPUTED else value

    def _chosen(self, shape: torch.Size, num_experts: int) -> Tensor:
        """Return the ids of the experts of all slots."""
        with without_dispatch_modes():
            slots = torch.arange(shape.numel())
            num_hot = round(len(slots) * self._hot_share)
            return (slots - num_hot).clamp_min(0).remainder(num_experts).view(shape)
