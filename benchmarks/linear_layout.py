"""The layout of `torch.nn.functional.linear`, with gate and up in one matrix, as transformers and vLLM have it."""

import torch
from torch import Tensor

from benchmarks.problem import Problem


def to_linear_layout(problem: Problem) -> tuple[Tensor, Tensor]:
    """The weights `gate_up` ``(E, 2F, D)``, in it gate first, and `down` ``(E, D, F)``."""
    gate_up = torch.cat([problem.gate, problem.up], 2).transpose(1, 2).contiguous()
    return gate_up, problem.down.transpose(1, 2).contiguous()


def from_linear_layout(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The way back, by the names and in the shapes of `Problem`."""
    gate, up = gate_up.transpose(1, 2).chunk(2, 2)
    return {"gate": gate, "up": up, "down": down.transpose(1, 2)}
