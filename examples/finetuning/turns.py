"""Several trainings that take turns, each in a process of its own, so that none has the machine when it is quieter."""

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

_training: Training  # of this process, which has one


class Apart:
    """A training in a new process, whose memory is then that of this run alone.

    Args:
        pool: of one process.
        arguments: of `Training`, the implementation last.

    Raises:
        InputError: as `Training`; of every method, also if the process was killed.
    """

    def __init__(self, pool: ProcessPoolExecutor, *arguments: Any) -> None:
        self.pool, self.implementation = pool, arguments[-1]
        self._call(_begin, *arguments)

    def step(self) -> float:
        """Take a step and return its loss."""
        return self._call(_step)

    def run(self) -> Run:
        """Return what was measured."""
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
    """Take all steps of all implementations, one step of each in turn; another one begins every time.

    Args:
        options: the command line.
        text: ``(N,)`` uint8.
        implementations: of the experts.

    Returns:
        What was measured, in the order of the implementations.

    Raises:
        InputError: if there is no such model, it does not train, or its process was killed.
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
