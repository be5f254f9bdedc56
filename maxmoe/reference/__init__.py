"""The specification: every operator and the layer, in plain loops.

One token, slot or row at a time, any dtype, gradients by autograd. Written to be read and to be compared
with, never to be fast. `routing` and `operators` have the names of `maxmoe.ops`; `layer` is `maxmoe.MoE` as a function.

T tokens, D hidden_size, F intermediate_size, E experts, K top_k, L local experts, R routed rows; a slot is
one (token, k) pair, number t * K + k. Sums and router math are in float32, in float64 when the input is
float64, and are rounded to the dtype of the input once, at the end.
"""

from maxmoe.reference.layer import apply_capacity, load_balance_loss, moe, router_z_loss
from maxmoe.reference.operators import (
    RaggedPlan,
    activate,
    expert_ffn,
    gmm,
    linear,
    ragged_dot,
    ragged_gather,
    ragged_gather_reduce,
    ragged_plan,
    ragged_scatter_add,
    ragged_sort,
    ragged_unsort,
    tgmm,
)
from maxmoe.reference.routing import route

__all__ = [
    "RaggedPlan",
    "activate",
    "apply_capacity",
    "expert_ffn",
    "gmm",
    "linear",
    "load_balance_loss",
    "moe",
    "ragged_dot",
    "ragged_gather",
    "ragged_gather_reduce",
    "ragged_plan",
    "ragged_scatter_add",
    "ragged_sort",
    "ragged_unsort",
    "route",
    "router_z_loss",
    "tgmm",
]
