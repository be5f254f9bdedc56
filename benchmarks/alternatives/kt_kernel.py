"""kt-kernel, of KTransformers: bfloat16 inference on AVX2 and up, full-weight training on AVX512-BF16 or AMX."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternatives.optional import lacks_flags, not_installed
from benchmarks.contender import Contender, Mode
from benchmarks.problem import Problem

TRAINING_FLAGS = ("avx512f", "avx512bw", "avx512_vnni", "avx512_vbmi", "avx512_bf16")
BLOCK = 32


class KtKernel(Contender):
    """`AMXSFTMoEWrapper` in full-weight mode for training, the `BF16` method of its inference wrapper for forward.

    Weights are in kt's layout, gate and up [E, F, D], down [E, D, F]; its kernels work on a packed copy of them.
    """

    name = "kt-kernel"
    settle_seconds = 0.06  # its threads spin for 50 ms after their work
    weight_copies = 3  # its layout, a packed copy, and buffers for gradients

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """See `Contender`."""
        if reason := not_installed("kt_kernel", "gguf", install="kt-kernel==0.7.2 gguf"):
            return reason
        if problem.dtype != torch.bfloat16:
            return "bfloat16 only"
        if problem.shape.hidden_size % BLOCK or problem.shape.intermediate_size % BLOCK:
            return f"needs D and F to be multiples of {BLOCK}"
        if mode == "forward+backward" and (reason := lacks_flags(*TRAINING_FLAGS)):
            return f"no training of bfloat16 weights: {reason}"
        self.trains = mode == "forward+backward"
        return None

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.x, self.weights, self.experts = problem.x, problem.weights, problem.experts
        self.cotangent = problem.cotangent
        matrices = (problem.gate, problem.up, problem.down)
        self.matrices = [each.transpose(1, 2).contiguous() for each in matrices]
        self.in_order = torch.arange(problem.shape.num_experts)
        if self.trains:
            self._prepare_training(problem)
        else:
            self._prepare_inference(problem)

    def _prepare_training(self, problem: Problem) -> None:
        from kt_kernel.sft import AMXSFTMoEWrapper

        T, D, F, E, K = problem.shape
        self.wrapper = AMXSFTMoEWrapper(
            layer_idx=0,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=D,
            moe_intermediate_size=F,
            num_gpu_experts=0,
            cpuinfer_threads=torch.get_num_threads(),
            threadpool_count=1,
            weight_path="",
            chunked_prefill_size=T,
            lora_rank=0,
            method="AMXBF16_SFT",
            full_weight_grad=True,
        )
        self.wrapper.load_weights_from_tensors(*self.matrices, self.in_order)
        self.wrapper.init_full_weight_grad_buffers(*self.matrices)
        # These are the weights that its optimizer changes.
        self.matrices = [self.wrapper.gate_proj_buf, self.wrapper.up_proj_buf, self.wrapper.down_proj_buf]

    def _prepare_inference(self, problem: Problem) -> None:
        """Load weights like its NativeMoEWrapper, but from memory instead of a checkpoint file."""
        from kt_kernel import kt_kernel_ext

        T, D, F, E, K = problem.shape
        self.on_gpu = torch.zeros(E, dtype=torch.bool)
        config = kt_kernel_ext.moe.MOEConfig(E, K, D, F, self.on_gpu.data_ptr())
        self.pool = _worker_pool(kt_kernel_ext, torch.get_num_threads())
        config.layer_idx, config.pool, config.max_len = 0, self.pool.backend_, max(T, BLOCK)
        config.gate_projs, config.up_projs, config.down_projs = (
            [[matrix.data_ptr() for matrix in each]] for each in self.matrices
        )
        config.gate_scales = config.up_scales = config.down_scales = [[0] * E]
        kernels = kt_kernel_ext.moe
        self.kernel = getattr(kernels, "AMXBF16_MOE", None) or kernels.AVX2BF16_MOE
        self.kernel = self.kernel(config)
        self.num_tokens = torch.tensor([T], dtype=torch.int32)
        self.repack()

    def parameters(self) -> Sequence[Tensor]:
        """See `Contender`."""
        return self.matrices

    def repack(self) -> None:
        """See `Contender`."""
        if self.trains:
            self.wrapper.update_base_weights()
        else:
            self._run(self.kernel.load_weights_task(self.in_order.data_ptr()))

    def forward(self) -> Tensor:
        """See `Contender`."""
        output = torch.empty_like(self.x)
        tensors = (self.experts, self.weights, self.x, output)
        pointers = [tensor.data_ptr() for tensor in tensors]
        top_k, is_incremental = self.experts.shape[1], False
        self._run(self.kernel.forward_task(self.num_tokens.data_ptr(), top_k, *pointers, is_incremental))
        return output

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """See `Contender`."""
        output = self.wrapper.forward(self.x, self.experts, self.weights, save_for_backward=True)
        of_x, of_weights = self.wrapper.backward(self.cotangent)
        of_matrices = (self.wrapper.grad_gate_proj_buf, self.wrapper.grad_up_proj_buf, self.wrapper.grad_down_proj_buf)
        return output, (of_x, of_weights, *of_matrices)

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, weights, gate, up, down = gradients
        by_name = {"gate": gate, "up": up, "down": down}
        return {"x": x, "weights": weights} | {name: each.transpose(1, 2) for name, each in by_name.items()}

    def _run(self, task: Any) -> None:
        self.pool.submit(task)
        self.pool.sync()


POOLS: dict[int, Any] = {}


def _worker_pool(kt_kernel_ext: Any, threads: int) -> Any:
    """One thread pool for the process, because each pool starts its own threads."""
    if threads not in POOLS:
        config = kt_kernel_ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        POOLS[threads] = kt_kernel_ext.CPUInfer(config)
    return POOLS[threads]
