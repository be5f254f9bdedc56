"""The contenders for the experts, a file for each library, and the bounds."""

from collections.abc import Collection

import torch

from benchmarks.alternatives.bandwidth_bound import BandwidthBound
from benchmarks.alternatives.dense_bound import DenseBound
from benchmarks.alternatives.jax_ragged_dot import JaxRaggedDot
from benchmarks.alternatives.kt_kernel import KtKernel
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts, MaxmoeLinearLayout
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.alternatives.vllm_cpu import SglFusedExperts, VllmFusedMoE
from benchmarks.contender import Contender


def contenders() -> list[Contender]:
    """Return a new object of each contender, maxmoe first."""
    return [
        MaxmoeExperts(),
        MaxmoeLinearLayout(),
        TransformersExperts("grouped_mm"),
        TransformersExperts("eager"),
        TorchGroupedMM(),
        SglFusedExperts(),
        VllmFusedMoE(),
        KtKernel(),
        JaxRaggedDot(),
    ]


BOUNDS = ("flops", "bandwidth")


def bounds(names: Collection[str], dtype: torch.dtype) -> list[Contender]:
    """Return the requested ones of `BOUNDS`; the bound of FLOPs in this dtype, and in float32 if it differs."""
    of_flops = [DenseBound(each) for each in dict.fromkeys([dtype, torch.float32])] if "flops" in names else []
    return [*of_flops, *([BandwidthBound()] if "bandwidth" in names else [])]
