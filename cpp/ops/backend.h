// The threads and the matrix product that kernels use, and the choice between kernels and ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/executor.h"
#include "kernels/product/gemm.h"

namespace maxmoe::ops {

// Whether an operator runs a kernel for this tensor: on the CPU, unless ATen is forced. Otherwise it calls ATen.
bool uses_kernels(const at::Tensor& tensor);

// Makes operators call ATen for tensors on the CPU as well, on all threads of the process. Returns the previous
// setting.
bool force_aten(bool enabled);

// Runs tasks on the threads of torch (torch.set_num_threads).
const Executor& torch_executor();

// The faster product on this processor, ours or torch's. T: double, float, BFloat16, Float16.
template <class T>
const Gemm<T>& best_gemm();

}  // namespace maxmoe::ops
