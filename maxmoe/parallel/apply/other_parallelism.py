"""Parallelism of torch that cannot be added to a parallelized model: an error instead of one of torch's operators."""

from functools import cache

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from maxmoe.parallel.apply.interruptions import GuardedModule


@cache
def refuse_other_parallelism() -> None:
    """Refuse DDP around a parallelized module, and `ZeroRedundancyOptimizer` for its parameters; once per process."""
    register_module_module_registration_hook(_refuse_ddp)
    register_optimizer_step_pre_hook(_refuse_zero)


def _refuse_ddp(outer: nn.Module, _name: str, inner: nn.Module | None) -> None:
    if not isinstance(outer, DistributedDataParallel) or inner is None:
        return
    if any(isinstance(module, GuardedModule) for module in inner.modules()):
        raise ValueError(
            f"DistributedDataParallel must not wrap a module after parallelize, got {type(inner).__name__}: "
            "parallelize reduces the gradients over all axes of the mesh, of which 'data' replicates the model"
        )


def _refuse_zero(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    # Its module is not imported, which takes time.
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
        return
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "ZeroRedundancyOptimizer must not hold parameters of a module after parallelize: the optimizer that it "
            "wraps has the states of this rank's shards alone, so use that one"
        )
