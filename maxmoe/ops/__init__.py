"""Differentiable operators, for any floating dtype, any strides and any sizes.

Each function calls the operator of the same name in `torch.ops.maxmoe`, with a plan in place of its tensors: through
the C++ core, in less time than through `torch.ops`, which it takes while a compiler traces.
`maxmoe.reference` has an implementation of each operator in plain loops. A wrong argument, such as an index out of
range or a size that does not fit, raises a `ValueError` that names the operator, the argument and its value.

Every operator that takes floating tensors supports

- `torch.autograd`: derivatives of any order (`create_graph`), batched gradients (`is_grads_batched`,
  `torch.autograd.functional.jacobian(vectorize=True)`), forward mode (`torch.autograd.forward_ad`), and forward mode
  over reverse mode. In these cases, `expert_ffn` and `route` are composed of other operators and of PyTorch's: a
  second derivative of `expert_ffn` recomputes the pre-activations, and results differ by rounding.
- a split backward, as in zero bubble schedules: first for the inputs with `retain_graph=True`, later for the weights.
  A backward computes the gradients that it is asked for, with the same bits, so that none is computed twice. Both
  halves of `expert_ffn` need the gradient of the activations and compute it: 7 products instead of 6 in all, 5 instead
  of 4 without a gate.
- `torch.func.jvp`, `jacfwd` and `vmap`, also over parameters that require gradients. There are no batching rules:
  PyTorch calls the operator once per batch element, and warns that this is slow.

`torch.func.grad`, `vjp`, `jacrev` and `hessian` raise `NotImplementedError`, because PyTorch has no such transforms of
autograd functions in C++. Use `torch.autograd.grad` instead.
"""

from maxmoe import _C as _C  # registers the operators; first
from maxmoe.ops import _fake as _fake
from maxmoe.ops._projection import LowRankFactors, Projection
from maxmoe.ops._runtime import force_aten, force_cuda_emulator
from maxmoe.ops.expert_ffn import ActivationFunction, expert_ffn
from maxmoe.ops.products import gmm, linear, tgmm
from maxmoe.ops.routing import RaggedPlan, ragged_plan, route
from maxmoe.ops.rows import (
    ragged_dot,
    ragged_gather,
    ragged_gather_reduce,
    ragged_scatter_add,
    ragged_sort,
    ragged_unsort,
)

__all__ = [
    "ActivationFunction",
    "LowRankFactors",
    "Projection",
    "RaggedPlan",
    "expert_ffn",
    "force_aten",
    "force_cuda_emulator",
    "gmm",
    "linear",
    "ragged_dot",
    "ragged_gather",
    "ragged_gather_reduce",
    "ragged_plan",
    "ragged_scatter_add",
    "ragged_sort",
    "ragged_unsort",
    "route",
    "tgmm",
]
