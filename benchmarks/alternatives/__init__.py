"""The contenders for the experts, a file for each library."""

from benchmarks.alternatives.jax_ragged_dot import JaxRaggedDot
from benchmarks.alternatives.kt_kernel import KtKernel
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.alternatives.vllm_cpu import SglFusedExperts, VllmFusedMoE
from benchmarks.contender import Contender


def contenders() -> list[Contender]:
    """A new object of each, maxmoe first."""
    return [
        MaxmoeExperts(),
        TransformersExperts("grouped_mm"),
        TransformersExperts("eager"),
        TorchGroupedMM(),
        SglFusedExperts(),
        VllmFusedMoE(),
        KtKernel(),
        JaxRaggedDot(),
    ]
