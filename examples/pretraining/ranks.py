"""The processes that train one model together: those that torchrun started, or this one alone."""

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import Dispatch, parallelize, token_group, token_sharding
from maxmoe.planning import estimate
from maxmoe.planning.estimate import Optimizer
from maxmoe.sharding import LogicalRules, Mesh, check_used, parse_mesh
from pretraining import InputError

GIB = 2**30
TIMEOUT = timedelta(minutes=10)  # of every collective
PATIENCE = timedelta(seconds=5)  # with ranks that do not come to the end, or give no sign of life


@contextmanager
def joined() -> Iterator[None]:
    """Meet the other ranks; only the first one prints, and none leaves before the others come to the end."""
    if not dist.is_torchelastic_launched():
        yield
        return
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it has advice on the order of gathers
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        with ExitStack() as silence:
            if not is_first():
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield
        with suppress(RuntimeError):  # torchrun ends all ranks when the first one ends with an error
            dist.monitored_barrier(timeout=PATIENCE)
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Tell whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def agreed() -> Iterator[None]:
    """Around what may fail on some ranks only: all raise the `InputError` of the first that has one."""
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
    """Hold a lock on a folder, so that no other run writes there. Rank 0 holds it; it ends with the process.

    Raises:
        InputError: on all ranks, if another run holds it.
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
    """Return the largest of the numbers that the ranks have."""
    if not dist.is_initialized():
        return number
    result = torch.tensor(number)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


def command() -> list[str]:
    """Return the words that started the ranks."""
    if dist.is_initialized():
        return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *sys.argv]
    return [sys.executable, *sys.argv]


class Split:
    """How the ranks divide the model and every batch; one process has all of both.

    Args:
        mesh: the axes over which the ranks are laid out, see `maxmoe.sharding.parse_mesh`.
        rules: see `maxmoe.sharding.LogicalRules.load`.
        batch_shape: sequences and their length.

    Raises:
        InputError: if they do not fit each other or the number of ranks.
    """

    def __init__(self, mesh: str, rules: str, batch_shape: tuple[int, int]) -> None:
        try:
            sizes, self.rules = parse_mesh(mesh), LogicalRules.load(rules)
            self.mesh = Mesh(sizes, timeout=TIMEOUT) if dist.is_initialized() else Mesh.planned(sizes, world_size=1)
            check_used(self.mesh, self.rules)
            self.batch_shape = batch_shape
            self.batch = token_sharding(self.mesh, self.rules)
            self.tokens = token_group(self.mesh, self.rules)
            for option, size, axes in zip(("batch-size", "sequence-length"), batch_shape, self.batch.spec, strict=True):
                if size % self.mesh.size(*axes):
                    product = " * ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
                    raise ValueError(f"--{option} {size} is not divisible by {product}")
        except (OSError, ValueError) as error:
            raise InputError(f"--mesh {mesh} --rules {rules}: {error}") from error

    def check_memory(self, config: DecoderConfig, optimizer: Optimizer, dispatch: Dispatch, num_chunks: int) -> None:
        """Raise an `InputError` if training such a model would take more memory than the machine has."""
        batch_size, length = self.batch_shape
        step: dict[str, Any] = {"batch_size": batch_size, "sequence_length": length}
        step |= {"optimizer": optimizer, "dispatch": dispatch, "num_chunks": num_chunks}

        def needed(num_layers: int) -> int:
            with torch.device("meta"):
                model = Decoder(replace(config, num_layers=num_layers))
            return sum(estimate(model, self.mesh, self.rules, **step).memory.values())

        try:
            first, second = needed(1), needed(2)  # every further one needs as much more as the second
        except ValueError as error:
            raise InputError(f"--dispatch {dispatch} --num-chunks {num_chunks}: {error}") from error
        except RuntimeError as error:  # torch counts bytes with 64 bits
            raise InputError(f"the model is too large: {error}") from error
        needed_here = (first + (config.num_layers - 1) * (second - first)) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed_here > memory:
            raise InputError(
                f"the run would need about {needed_here / GIB:,.1f} GiB of memory, the machine has "
                f"{memory / GIB:,.1f}: try a smaller model or --batch-size"
            )

    def parallelize(self, model: Decoder, dispatch: Dispatch, num_chunks: int) -> None:
        """Leave this rank's part of the parameters, and let the model run on this rank's part of a batch."""
        if dist.is_initialized():
            try:
                parallelize(model, self.mesh, self.rules, dispatch=dispatch, num_chunks=num_chunks)
            except ValueError as error:
                raise InputError(f"--dispatch {dispatch} --num-chunks {num_chunks}: {error}") from error

    def part(self, batch: Tensor) -> Tensor:
        """Take this rank's part of a batch ``(B, S)``."""
        return batch[self.batch.slices(batch.shape, self.mesh.rank or 0)]
