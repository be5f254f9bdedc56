"""The experts in JAX, with `jax.lax.ragged_dot`."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternatives.optional import not_installed
from benchmarks.contender import Contender, Mode
from benchmarks.problem import Problem


class JaxRaggedDot(Contender):
    """Sort, gather, `ragged_dot`, multiply by weights, scatter-add, compiled by XLA. JAX arrays are immutable."""

    name = "jax ragged_dot"
    settle_seconds = 0.06
    weight_copies = 2  # one of them in numpy, during preparation

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """See `Contender`."""
        if reason := not_installed("jax", "jaxlib", install="jax jaxlib ml_dtypes opt_einsum scipy"):
            return reason
        if torch.get_num_threads() != os.cpu_count():
            return f"always takes all {os.cpu_count()} CPUs"
        return None

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        import jax

        jax.config.update("jax_platforms", "cpu")
        self.experts = _to_jax(problem.experts.to(torch.int32))
        tensors = (problem.x, problem.weights.to(problem.dtype), problem.gate, problem.up, problem.down)
        self.leaves = [_to_jax(tensor) for tensor in tensors]
        self.cotangent = _to_jax(problem.cotangent)

    def parameters(self) -> Sequence[Tensor]:
        """See `Contender`."""
        return []

    def forward(self) -> Any:
        """See `Contender`; a JAX array."""
        return _compiled()[0](self.experts, *self.leaves).block_until_ready()

    def step(self) -> Any:
        """See `Contender`; JAX arrays."""
        import jax

        return jax.block_until_ready(_compiled()[1](self.experts, self.cotangent, *self.leaves))

    def results(self, mode: Mode) -> dict[str, Tensor]:
        """See `Contender`."""
        if mode != "forward+backward":
            return {"output": _to_torch(self.forward())}
        output, gradients = self.step()
        names = ("output", "x", "weights", "gate", "up", "down")
        return {name: _to_torch(array) for name, array in zip(names, (output, *gradients), strict=True)}


@cache
def _compiled() -> tuple[Any, Any]:
    """Forward, and forward with backward; XLA compiles each once for each shape."""
    import jax

    def step(experts: Any, cotangent: Any, *leaves: Any) -> Any:
        output, pull_back = jax.vjp(lambda *leaves: _experts(experts, *leaves), *leaves)
        return output, pull_back(cotangent)

    return jax.jit(_experts), jax.jit(step)


def _experts(experts: Any, x: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
    import jax
    from jax import numpy as jnp

    expert_of_slot = experts.reshape(-1)
    slots = jnp.argsort(expert_of_slot)
    tokens = slots // experts.shape[1]
    group_sizes = jnp.bincount(expert_of_slot, length=gate.shape[0])
    rows = x[tokens]
    activated = jax.nn.silu(jax.lax.ragged_dot(rows, gate, group_sizes)) * jax.lax.ragged_dot(rows, up, group_sizes)
    outputs = jax.lax.ragged_dot(activated, down, group_sizes) * weights.reshape(-1)[slots][:, None]
    return jnp.zeros_like(x).at[tokens].add(outputs)


def _to_jax(tensor: Tensor) -> Any:
    from jax import numpy as jnp

    # numpy has no bfloat16; JAX casts back without a loss.
    array = jnp.array((tensor.float() if tensor.is_floating_point() else tensor).numpy())
    return array.astype(str(tensor.dtype).removeprefix("torch."))


def _to_torch(array: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(array.astype("float32")))
