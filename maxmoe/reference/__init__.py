"""Specification of every operator and of the layer, in plain loops over tokens, slots and rows.

The functions take any dtype and are differentiated by autograd. They are written for reading and for tests, not for
speed. `routing` and `operators` have the names of `maxmoe.ops`; `layer` is `maxmoe.MoE` as a function.

T tokens, D hidden_size, F intermediate_size, E experts, K top_k, L local experts, R routed rows. A slot is a (token, k)
pair with index t * K + k. Sums and routing are computed in float32, or in float64 for float64 inputs, and rounded to
the dtype of the input once, at the end.
"""

from maxmoe.reference.layer import apply_capacity, load_balance_loss, moe, router_z_loss
from maxmoe.reference.operators import (
    LowRankFactors,
    Projection,
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
from maxmoe.reference.quantization import dequantize
from maxmoe.reference.routing import balanced_bias, route

__all__ = [
    "LowRankFactors",
    "Projection",
    "RaggedPlan",
    "activate",
    "apply_capacity",
    "balanced_bias",
    "dequantize",
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
