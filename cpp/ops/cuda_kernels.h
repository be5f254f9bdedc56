// The CUDA kernels that operators run, on a GPU or in the emulator: both are libraries beside this one, opened at run
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "cuda/library.h"
#include "ops/backend.h"

namespace maxmoe::ops {

// The kernels for the tensors of one device, and its current stream.
struct CudaKernels {
  const cuda::Library* library;
  cuda::Stream stream;

  template <class T>
  const cuda::RowKernels<T>& rows() const {
    return std::get<cuda::RowKernels<T>>(library->kernels);
  }
};

// Runs a kernel that takes the same arguments on CUDA and on the CPU: the CUDA kernel if `kernels` are given.
template <class Table, class Arguments>
void run(const std::optional<CudaKernels>& kernels, void (*Table::*of_cuda)(const Arguments&, cuda::Stream),
         void (*of_cpu)(const Arguments&, const Executor&), const std::type_identity_t<Arguments>& arguments) {
  if (kernels.has_value()) {
    (std::get<Table>(kernels->library->kernels).*of_cuda)(arguments, kernels->stream);
  } else {
    of_cpu(arguments, torch_executor());
  }
}

// The kernels if a tensor uses the one of this name (ops/backend.h).
std::optional<CudaKernels> cuda_kernels(const at::Tensor& tensor, const char* kernel);

// Whether the kernels can run on GPUs here.
bool has_cuda_kernels();

// The reason why not, or a statement that they can.
std::string state_of_cuda_kernels();

// Opens the library of the emulator. Throws if it has not been built.
void open_cuda_emulator();

}  // namespace maxmoe::ops
