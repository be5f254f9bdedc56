"""Runs several trainings in turns, each in its own process, so that other load on the machine slows all alike."""

import multiprocessing
from argparse import Namespace
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from tqdm import tqdm

from finetuning.training import Run, Training
from pretraining import InputError

_training: Training  # the training of this process


class Apart:
    """A training in a new process, so that the memory of the process is due to this run alone.

    Args:
        pool: pool of one process.
        arguments: arguments of `Training`, the implementation last.

    Raises:
        InputError: for the reasons of `Training`, and from every method if the process was killed.
    """

    def __init__(self, pool: ProcessPoolExecutor, *arguments: Any) -> None:
        self.pool, self.implementation = pool, arguments[-1]
        self._call(_begin, *arguments)

    def step(self) -> float:
        """Take a step and return its loss."""
        return self._call(_step)

    def run(self) -> Run:
        """Return the measurements."""
        return self._call(_run)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return self.pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            message = f"{self.implementation}: the process was killed, perhaps for want of memory"
            raise InputError(message) from error


def _begin(*arguments: Any) -> None:
    global _training
    _training = Training(*arguments)


def _step() -> float:
    return _training.step()


def _run() -> Run:
    return _training.run()


def train_in_turns(options: Namespace, text: Tensor, implementations: tuple[str, ...]) -> list[Run]:
    """Train with all implementations, one step each in turn. The order rotates from step to step.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        implementations: experts implementations.

    Returns:
        The measurements, in the order of the implementations.

    Raises:
        InputError: if a model cannot be built, diverges, or its process was killed.
    """
    context = multiprocessing.get_context("spawn")
    num_tokens = options.batch_size * options.sequence_length * len(implementations)
    bar = {"unit": " tokens", "unit_scale": True, "dynamic_ncols": True, "mininterval": 0.5}
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for _ in implementations]
        trainings = [Apart(pool, options, text, name) for pool, name in zip(pools, implementations, strict=True)]
        turns = deque(trainings)
        progress = stack.enter_context(tqdm(total=options.steps * num_tokens, **bar))
        for _ in range(options.steps):
            losses = [training.step() for training in turns]
            turns.rotate(-1)
            progress.set_postfix_str(f"loss {losses[0]:.3f}", refresh=False)
            progress.update(num_tokens)
        return [training.run() for training in trainings]
