"""FSDP2: `set_gradient_divide_factor` divides twice if the group has one rank, in float64 and float16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
for dtype in (torch.float32, torch.float64):
    layer = fully_shard(nn.Linear(4, 4, dtype=dtype), mesh=mesh)
    layer.set_gradient_divide_factor(2.0)
    layer(torch.ones(1, 4, dtype=dtype)).sum().backward()
    print(dtype, layer.bias.grad.full_tensor().tolist(), "expected 0.5")
dist.destroy_process_group()
