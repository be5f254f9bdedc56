"""Ring attention of `torch.distributed.tensor.experimental.context_parallel`, with the kernels of the CPU.

`context_parallel` sends attention of CUDA through it. Here it is registered for the operators of the CPU, which are
others.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from support.compared_models import WIDTH, Case, build, whole_batch

LENGTH, HEADS = 8, 2
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *inputs: Tensor) -> Tensor:
        output, sums = ring._templated_ring_attention(dist.group.WORLD, 2, ATTENTION, *inputs, is_causal=True)
        context.save_for_backward(*inputs, output, sums)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        query, key, value, output, sums = context.saved_tensors
        group, names = dist.group.WORLD, "grad_out"
        saved = query, key, value, output, sums
        return ring._templated_ring_attention_backward(
            group, 2, BACKWARD, gradient.contiguous(), names, *saved, is_causal=True, dropout_p=0.0
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        if dist.is_initialized():
            y = RingAttention.apply(query, key, value)
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


build_attention = partial(build, Attention)


def in_order(model: nn.Module) -> nn.Module:
    ring._cp_options.enable_load_balance, ring._cp_options.convert_to_f32 = False, False
    return nn.parallel.DistributedDataParallel(model)


def balanced(model: nn.Module) -> nn.Module:
    """Each rank has one part from the first half of a sequence and one from the second half."""
    ring._cp_options.enable_load_balance, ring._cp_options.convert_to_f32 = True, False
    return nn.parallel.DistributedDataParallel(model)


def positions(rank: int, num_ranks: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat([tensor, tensor], 1)[:, :LENGTH].chunk(num_ranks, 1)[rank] for tensor in whole_batch())


def balanced_positions(rank: int, num_ranks: int) -> tuple[Tensor, ...]:
    halves = [torch.cat([tensor, tensor], 1)[:, :LENGTH].chunk(2 * num_ranks, 1) for tensor in whole_batch()]
    return tuple(torch.cat([parts[rank], parts[2 * num_ranks - 1 - rank]], 1) for parts in halves)


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


RIGHT = {
    "ring attention of torch": Case(in_order, 4, loss=mean, make_batch=positions, build=build_attention),
    "ring attention of torch, balanced": Case(
        balanced, 2, loss=mean, make_batch=balanced_positions, build=build_attention
    ),
}
