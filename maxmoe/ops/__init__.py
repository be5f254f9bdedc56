"""The operators: differentiable, for any floating dtype, any strides, any sizes.

A function here is the operator of the same name in `torch.ops.maxmoe`, with a plan in place of its tensors.
`maxmoe.reference` computes each one in loops.

Every operator that takes floating tensors works with

- `torch.autograd`: any number of times (`create_graph`), for batches of gradients (`is_grads_batched`,
  `torch.autograd.functional.jacobian(vectorize=True)`), in forward mode (`torch.autograd.forward_ad`), and forward
  mode over reverse mode. Here `expert_ffn` and `route` are composed of the other operators and of PyTorch's: a second
  derivative of `expert_ffn` computes the pre-activations again, and results differ by rounding.
- `torch.func.jvp`, `jacfwd` and `vmap`; also over parameters that require gradients. There are no batching rules:
  PyTorch calls the operator once for each member of the batch, and warns that this is slow.

`torch.func.grad`, `vjp`, `jacrev` and `hessian` raise `NotImplementedError`: PyTorch has no such transforms of
autograd functions in C++. `torch.autograd.grad` computes the same.
"""

from maxmoe import _library as _library  # registers the operators; first
from maxmoe.ops._force_aten import force_aten
from maxmoe.ops.expert_ffn import expert_ffn
from maxmoe.ops.gmm import gmm
from maxmoe.ops.linear import linear
from maxmoe.ops.ragged_dot import ragged_dot
from maxmoe.ops.ragged_gather import ragged_gather
from maxmoe.ops.ragged_gather_reduce import ragged_gather_reduce
from maxmoe.ops.ragged_plan import RaggedPlan, ragged_plan
from maxmoe.ops.ragged_scatter_add import ragged_scatter_add
from maxmoe.ops.ragged_sort import ragged_sort
from maxmoe.ops.ragged_unsort import ragged_unsort
from maxmoe.ops.route import route
from maxmoe.ops.tgmm import tgmm

__all__ = [
    "RaggedPlan",
    "expert_ffn",
    "force_aten",
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
