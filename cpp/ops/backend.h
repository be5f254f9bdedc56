// What the kernels run on: torch's threads, and a matrix product. And whether they run at all.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/executor.h"
#include "kernels/gemm.h"

namespace maxmoe::ops {

// Tensors on the CPU go to the kernels; those of other devices, and with force_aten all, go through ATen.
bool uses_kernels(const at::Tensor& tensor);
void force_aten(bool enabled);

const Executor& torch_executor();

// The fastest product on this processor, ours or torch's. T: double, float, BFloat16, Float16.
template <class T>
const Gemm<T>& best_gemm();

}  // namespace maxmoe::ops
