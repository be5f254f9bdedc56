"""
The C++ core of maxmoe.

Its operators are those of `torch.ops.maxmoe`, called in less time: `maxmoe.ops` has their documentation, and
calls `torch.ops` instead while a compiler traces. A wrong type raises a TypeError, a wrong value a ValueError.
"""

from __future__ import annotations
import maxmoe.ops
import maxmoe.quantization
import torch
import typing

__all__: list[str] = [
    "RoutedExperts",
    "are_false",
    "build_info",
    "dequantize",
    "empty_cache",
    "expert_ffn",
    "force_path",
    "gmm",
    "linear",
    "memory_allocated",
    "memory_reserved",
    "ragged_dot",
    "ragged_gather",
    "ragged_gather_reduce",
    "ragged_plan",
    "ragged_scatter_add",
    "ragged_sort",
    "ragged_unsort",
    "route",
    "router_entropy",
    "tgmm",
]

class RoutedExperts:
    """
    Router and experts of a layer in one call of the operator `routed_experts`, whose constants are given once.
    """
    def __call__(
        self,
        x: torch.Tensor,
        router: dict[str, typing.Any],
        router_buffers: dict[str, typing.Any],
        experts: dict[str, typing.Any],
        recompute: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """
        Route tokens (..., D) and compute their experts.

        Returns out, logits, weights, experts, probabilities, tokens_per_expert and dropped; None if x has another size
        or dtype than the experts, or their matrices are not tensors in the table of parameters.
        """
    def __init__(
        self,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        top_k: typing.SupportsInt | typing.SupportsIndex,
        score_function: str,
        num_groups: typing.SupportsInt | typing.SupportsIndex,
        top_k_groups: typing.SupportsInt | typing.SupportsIndex,
        group_score: str,
        normalization: str,
        scale: typing.SupportsFloat | typing.SupportsIndex,
        activation: str,
        limit: typing.SupportsFloat | typing.SupportsIndex | None,
        limit_target: str,
        gate_softcap: typing.SupportsFloat | typing.SupportsIndex | None,
        up_softcap: typing.SupportsFloat | typing.SupportsIndex | None,
    ) -> None: ...

def are_false(entries: tuple[tuple[dict[str, typing.Any], str], ...]) -> bool:
    """
    Return whether no entry (table, name) is there and true, as an attribute of a module with a hook is.
    """

def build_info() -> dict[str, typing.Any]:
    """
    Return the versions of the core, torch, compiler and Eigen, the instruction sets and the cache.
    """

def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    format: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """
    Return the matrices (L, rows, columns) of codes, scales, zero points and scales of rows.
    """

def empty_cache() -> None:
    """
    Return cached memory of the operators to the system, as `torch.cuda.empty_cache` does for a GPU.

    On Linux, freed CPU memory of results and work space of at least 1 MiB is cached for later calls. The cache is never
    larger than the peak use, and the system can reclaim it when it needs memory (`MADV_FREE`), so that it only shows in
    the resident memory of the process. On other systems, nothing is cached.
    """

def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    plan: maxmoe.ops.RaggedPlan,
    gate: torch.Tensor | maxmoe.quantization.QuantizedStack | maxmoe.ops.Projection | None,
    up: torch.Tensor | maxmoe.quantization.QuantizedStack | maxmoe.ops.Projection,
    down: torch.Tensor | maxmoe.quantization.QuantizedStack | maxmoe.ops.Projection,
    activation: str = "silu",
    limit: float | None = None,
    limit_target: str = "input",
    gate_softcap: float | None = None,
    up_softcap: float | None = None,
    fused_gate: str | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """
    Compute the routed experts: gather, gate and up, activation, down, weighted sum.
    """

def force_path(path: str) -> str:
    """
    Set the implementation of operators for tensors on the CPU: "kernels", "cuda_emulator" or "aten".

    Returns the previous one.
    """

def gmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor | maxmoe.quantization.QuantizedStack | maxmoe.ops.Projection,
    group_sizes: torch.Tensor,
    group_offset: int = 0,
) -> torch.Tensor:
    """
    out[r] = rhs_l(lhs[r])   for the rows r of group l + group_offset
    """

def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """
    out[t, e] = <x[t], weight[e]> + bias[e]
    """

def memory_allocated() -> int:
    """
    Return the bytes in use by results and work space of operators.
    """

def memory_reserved() -> int:
    """
    Return the bytes in use and the bytes of freed pages that are kept.
    """

def ragged_dot(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor, group_size: int = 1) -> torch.Tensor:
    """
    out[j] = <a[j // group_size], b[index[j]]>   for index[j] >= 0, else 0
    """

def ragged_gather(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor | None = None,
    start: int | torch.SymInt = 0,
    end: int | torch.SymInt | None = None,
) -> torch.Tensor:
    """
    out[i] = weights[i] * x[index[i]]   for start <= i < end and index[i] >= 0, else 0
    """

def ragged_gather_reduce(
    rows: torch.Tensor,
    index: torch.Tensor,
    group_size: int,
    weights: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    out[t] = sum_j weights[j] * rows[index[j]]   over the valid j of group t
    """

def ragged_plan(
    experts: torch.Tensor,
    num_experts: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | torch.SymInt | None = None,
    num_rows: int | torch.SymInt | None = None,
) -> maxmoe.ops.RaggedPlan:
    """
    Sort the slots (T, K) by expert.
    """

def ragged_scatter_add(
    rows: torch.Tensor,
    index: torch.Tensor,
    num_rows: int | torch.SymInt,
    group_size: int = 1,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    out[n] = sum_j weights[j] * rows[j // group_size]   over the j with index[j] == n
    """

def ragged_sort(x: torch.Tensor, plan: maxmoe.ops.RaggedPlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """
    out[r] = weights[slots[r]] * x[slots[r] // K]   for the rows of a plan
    """

def ragged_unsort(rows: torch.Tensor, plan: maxmoe.ops.RaggedPlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """
    out[t] = sum_k weights[t, k] * rows[plan.rows[t * K + k]]   over the slots that have a row
    """

def route(
    logits: torch.Tensor,
    top_k: int,
    score_function: str = "softmax",
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "top2",
    normalization: str = "sum",
    scale: float = 1.0,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return weights and experts (T, K) and probabilities (T, E).
    """

def router_entropy(probabilities: torch.Tensor, divisor: int | torch.SymInt) -> torch.Tensor:
    """
    sum over t and e of -p[t, e] log(p[t, e]) / divisor, through which no gradient flows.
    """

def tgmm(
    lhs: torch.Tensor, rhs: torch.Tensor, group_sizes: torch.Tensor, num_local_groups: int, group_offset: int = 0
) -> torch.Tensor:
    """
    out[l] = lhs_g^T @ rhs_g   over the rows of group g = l + group_offset
    """
