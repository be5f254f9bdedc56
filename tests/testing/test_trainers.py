"""`compare_ranks` with the training steps of accelerate and DeepSpeed: docs/how_to/other_libraries.md."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.compared_models import MAX_NORM, MICRO_BATCHES, Case, Model, Update, clipped, loss, micro_batches
from support.forked_comparison import compare


def total(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([*loss(model, batch).values()]).sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def be_launched() -> None:
    """Set the variables that a launcher sets."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}


def of_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    be_launched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    object.__setattr__(prepared, "accelerated", (accelerator, optimizer))
    return prepared


def accumulated(model: Any, batch: Any) -> Tensor:
    accelerator, _ = model.accelerated
    losses = []
    for micro_batch in micro_batches(batch):
        with accelerator.accumulate(model):
            losses.append(total(model, micro_batch))
            accelerator.backward(losses[-1])
    return torch.stack(losses).mean().detach()


def update_of_accelerate(model: Any) -> Update:
    if not dist.is_initialized():
        return clipped(sgd(model), model)
    accelerator, optimizer = model.accelerated
    return clipped(optimizer, model, partial(accelerator.clip_grad_norm_, max_norm=MAX_NORM))


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    case = Case(of_accelerate, 2, step=accumulated, loss=total, make_update=update_of_accelerate, steps=3)
    compare(case).raise_if_different()


class OfDeepSpeed(Model):
    """The whole parameters and gradients of an engine of DeepSpeed, for every stage of ZeRO."""

    def __init__(self, stage: int, model: nn.Module) -> None:
        import deepspeed

        super().__init__()
        be_launched()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        object.__setattr__(self, "engine", engine)
        self.read_parameters()

    def read_parameters(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        for mine, parameter in zip(self.parameters(), self.engine.module.parameters(), strict=True):
            mine.data = safe_get_full_fp32_param(parameter).to(mine)

    def read_gradients(self) -> None:
        from deepspeed.utils import safe_get_full_grad

        for mine, parameter in zip(self.parameters(), self.engine.module.parameters(), strict=True):
            mine.grad = safe_get_full_grad(parameter).to(mine)


def step_of_deepspeed(model: Any, batch: Any) -> Tensor:
    found = total(model.engine, batch)
    model.engine.backward(found)
    model.read_gradients()
    return found.detach()


def update_of_deepspeed(model: Any) -> Update:
    if not dist.is_initialized():
        return clipped(sgd(model), model)

    def update() -> None:
        model.engine.step()
        model.read_parameters()

    return update


@pytest.mark.filterwarnings("ignore")  # deprecations of torch and Python
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_of_deepspeed(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    parallelize = partial(OfDeepSpeed, stage)
    make_update = update_of_deepspeed
    case = Case(parallelize, 2, step=step_of_deepspeed, loss=total, make_update=make_update, steps=3)
    compare(case, dtype=torch.float32, timeout=200.0).raise_if_different()
