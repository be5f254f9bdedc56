// The threads and the matrix product that kernels use, and the choice between CPU kernels, CUDA kernels and ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/executor.h"
#include "kernels/product/gemm.h"

namespace maxmoe::ops {

// The implementation that an operator runs for a tensor. Tensors on the CPU use its kernels unless another path is
// forced, tensors on a GPU the CUDA kernels if these are built and can run there, and all others ATen. Quantized
// matrices, linear, and route with very many experts have no CUDA kernel and go to ATen as well.
enum class Path { kernels, cuda_kernels, aten };
Path path_of(const at::Tensor& tensor);
// The same for an operator that runs a CUDA kernel of this name: ATen if the kernel is switched off. The environment
// variable MAXMOE_CUDA_KERNELS, read once, names the kernels that run: "all,-gmm,-tgmm", "ragged_gather,route", "none".
Path path_of(const at::Tensor& tensor, const char* kernel);

// Whether an operator runs a CPU kernel for this tensor.
inline bool uses_kernels(const at::Tensor& tensor) {
  return path_of(tensor) == Path::kernels;
}

// Sets the path of tensors on the CPU, on all threads of the process: "kernels", "cuda_emulator" or "aten". With
// "aten", tensors on GPUs go to ATen as well. Returns the previous path.
std::string force_path(const std::string& name);

// Runs tasks on the threads of torch (torch.set_num_threads).
const Executor& torch_executor();

// The matrix product of kernels. T: double, float, BFloat16, Float16.
template <class T>
const Gemm<T>& kernel_gemm();

}  // namespace maxmoe::ops
