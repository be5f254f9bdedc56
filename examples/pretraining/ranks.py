"""The ranks that train one model: the processes of torchrun, or a single process."""

import fcntl
import logging
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.costs import estimate
from maxmoe.costs.estimate import Optimizer
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import Dispatch, token_group, token_sharding
from maxmoe.sharding import LogicalRules, Mesh, check_used, parse_mesh
from maxmoe.sharding.mesh import STAGE_AXIS
from pretraining import InputError

GIB = 2**30
TIMEOUT = timedelta(minutes=10)  # for each collective
PATIENCE = timedelta(seconds=5)  # time to wait for ranks that have not finished or send no heartbeat


@contextmanager
def joined() -> Iterator[None]:
    """Initialize torch.distributed under torchrun. Only rank 0 prints, and all ranks leave together."""
    if not dist.is_torchelastic_launched():
        yield
        return
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # hides hints about the order of all-gathers
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        with ExitStack() as silence:
            if not is_first():
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield
        with suppress(RuntimeError):  # another rank failed; torchrun ends all ranks
            dist.monitored_barrier(timeout=PATIENCE)
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def agreed() -> Iterator[None]:
    """Raise an `InputError` of one rank on all ranks. Collectives in the body must fail on all ranks or on none."""
    message = None
    try:
        yield
    except InputError as error:
        message = str(error)
    messages = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
    for message in filter(None, messages):
        raise InputError(message)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other run writes there. The lock of rank 0 is released when the process ends.

    Raises:
        InputError: on all ranks, if another run has locked the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with agreed():
            if is_first():
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    reason = "another run is writing there" if isinstance(error, BlockingIOError) else error.strerror
                    raise InputError(f"cannot write to --out {folder}: {reason}") from error
        yield
    finally:
        os.close(descriptor)


def largest(number: int) -> int:
    """Return the maximum of `number` over the ranks."""
    if not dist.is_initialized():
        return number
    result = torch.tensor(number)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


def of_all(mine: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of all ranks, by name. Ranks that have the same name have the same number."""
    parts = [mine]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, mine)
    return {name: number for part in parts for name, number in part.items()}


def command() -> list[str]:
    """Return the command line that starts this run."""
    if dist.is_initialized():
        return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *sys.argv]
    return [sys.executable, *sys.argv]


class Split:
    """Sharding of the model and of every batch over the ranks. A single process has the whole model and batch.

    Args:
        options: options of the command line: mesh, rules, schedule, num_micro_batches, batch_size, sequence_length.

    Raises:
        InputError: if mesh, rules, batch, micro-batches and number of ranks do not fit together.
    """

    def __init__(self, options: Namespace) -> None:
        try:
            sizes, self.rules = parse_mesh(options.mesh), LogicalRules.load(options.rules)
            self.mesh = Mesh(sizes, timeout=TIMEOUT) if dist.is_initialized() else Mesh.planned(sizes, world_size=1)
            self.has_stages = STAGE_AXIS in sizes
            self._check_micro_batches(options)
            self._stage = self.mesh.within_stage()  # this rank's part of the mesh
            check_used(self._stage, self.rules)
            self.batch_shape = (options.batch_size, options.sequence_length)
            self._batch = token_sharding(self._stage, self.rules)
            self.tokens = token_group(self._stage, self.rules)
            self._check_batch(options.num_micro_batches)
        except (OSError, ValueError) as error:
            raise InputError(f"--mesh {options.mesh} --rules {options.rules}: {error}") from error

    def _check_micro_batches(self, options: Namespace) -> None:
        given = {"schedule": options.schedule, "num-micro-batches": options.num_micro_batches}
        for name, value in given.items():
            if value is not None and not self.has_stages:
                raise ValueError(f"--{name} {value} needs an axis {STAGE_AXIS} in --mesh, such as {STAGE_AXIS}=2")
        if self.has_stages and options.num_micro_batches is None:
            raise ValueError(f"the axis {STAGE_AXIS} needs --num-micro-batches")
        if self.has_stages and not dist.is_initialized():
            raise ValueError(f"the axis {STAGE_AXIS} needs torchrun")

    def _check_batch(self, num_micro_batches: int | None) -> None:
        for option, size, axes in zip(
            ("batch-size", "sequence-length"), self.batch_shape, self._batch.spec, strict=True
        ):
            factors = {f"{axis}=": self.mesh.size(axis) for axis in axes}
            if option == "batch-size" and num_micro_batches:
                factors["--num-micro-batches "] = num_micro_batches
            if size % math.prod(factors.values()):
                product = " * ".join(f"{name}{factor}" for name, factor in factors.items())
                raise ValueError(f"--{option} {size} is not divisible by {product}")

    def check_memory(self, config: DecoderConfig, optimizer: Optimizer, dispatch: Dispatch, num_chunks: int) -> None:
        """Raise an `InputError` if training the model needs more memory than the machine has."""
        batch_size, length = self.batch_shape
        step: dict[str, Any] = {"batch_size": batch_size, "sequence_length": length}
        step |= {"optimizer": optimizer, "dispatch": dispatch, "num_chunks": num_chunks}

        def least(model: Decoder) -> int:
            """Return the bytes of a rank for parameters, their gradients, one moment, and the inputs of blocks."""
            parameters = sum(parameter.nbytes for parameter in model.parameters())
            inputs = batch_size * length * config.hidden_size * torch.float32.itemsize * model.config.num_layers
            return (3 * parameters + inputs) // self._stage.num_ranks

        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / self.mesh.size(STAGE_AXIS)  # sharing one model
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

        def check(needed: int) -> None:
            needed_here = needed * ranks_here
            if needed_here > memory:
                raise InputError(
                    f"the run would need about {needed_here / GIB:,.1f} GiB of memory, the machine has "
                    f"{memory / GIB:,.1f}: try a smaller model or --batch-size"
                )

        try:
            with torch.device("meta"):
                first, second = (least(Decoder(replace(config, num_layers=count))) for count in (1, 2))
                # An estimate computes the integers of a step: it must not need more memory.
                check(first + (config.num_layers - 1) * (second - first))
                model = Decoder(config)
            check(sum(estimate(model, self._stage, self.rules, **step).memory.values()))
        except ValueError as error:
            raise InputError(f"--dispatch {dispatch} --num-chunks {num_chunks}: {error}") from error
        except RuntimeError as error:  # sizes in bytes exceed 64 bits
            raise InputError(f"the model is too large: {error}") from error

    def part(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch ``(B, S)``."""
        return batch[self._batch.slices(batch.shape, self._stage.rank or 0)]
