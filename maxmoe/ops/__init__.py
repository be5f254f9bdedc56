"""The operators: differentiable, for any floating dtype, any strides, any sizes.

`maxmoe.ops.X` is `torch.ops.maxmoe.X` with a plan in place of its tensors. `maxmoe.reference` says in loops what
each one computes.
"""

from maxmoe import _library as _library  # registers the operators; first
from maxmoe.ops._force_aten import force_aten
from maxmoe.ops.expert_ffn import expert_ffn
from maxmoe.ops.gmm import gmm
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
