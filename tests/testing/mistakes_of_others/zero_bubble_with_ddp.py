"""torch 2.13, pytorch#144530: with a zero bubble schedule, DDP does not reduce the gradients of stages.

Two ranks with different data, each with both stages of a pipeline. After `step` their gradients should be equal.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = [dist.new_group([number]) for number in range(2)][rank]
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        torch.manual_seed(0)
        modules = [nn.parallel.DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
        stages = [PipelineStage(modules[i], i, 2, torch.device("cpu"), group=alone) for i in range(2)]
        schedule = kind(stages, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(1 + rank)
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
        gradients = [torch.empty(4, 4) for _ in range(2)]
        dist.all_gather(gradients, modules[1].module.weight.grad)
        if rank == 0:
            print(kind.__name__, "equal" if torch.equal(*gradients) else "different")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
