// The CUDA kernels as a shared library: libmaxmoe_cuda.so, which nvcc compiled, or libmaxmoe_cuda_emulator.so, the same
// sources for the emulator. The operators open one of them at run time and use this table alone, so that one library
// serves the operators of every release of torch.
#pragma once

#include <tuple>

#include "cuda/kernels.h"

namespace maxmoe::cuda {

template <template <class> class Arguments, class T>
using Kernel = void (*)(const Arguments<T>& arguments, Stream stream);

template <class T>
struct RowKernels {
  Kernel<RaggedGather, T> ragged_gather;
  Kernel<RaggedGatherReduce, T> ragged_gather_reduce;
  Kernel<RaggedGatherReduceOfTwo, T> ragged_gather_reduce_of_two;
  Kernel<RaggedScatterAdd, T> ragged_scatter_add;
  Kernel<RaggedDot, T> ragged_dot;
  Kernel<ActivateRows, T> activate_rows;
  Kernel<ActivateRowsBackward, T> activate_rows_backward;
  Kernel<Gmm, T> gmm;
  Kernel<Tgmm, T> tgmm;
};

template <class T>
struct RouteKernels {
  Kernel<Route, T> route;
  Kernel<RouteBackward, T> route_backward;
};

struct Library {
  size_t layout;                                // kLayout of the library
  const char* (*unusable)();                    // why no kernel can run on the current device, or null
  int (*compute_capability)(int device_index);  // 90 for 9.0; 0 in the emulator
  bool (*is_capturing)(Stream stream);          // in a CUDA graph
  int64_t (*ragged_plan_scratch)(int64_t num_slots, int64_t num_local_experts);
  int64_t (*ragged_scatter_add_scratch)(int64_t index_size, int64_t num_rows);
  void (*ragged_plan)(const RaggedPlan& plan, Stream stream);
  void (*check_plan)(const PlanValues& plan, Stream stream);
  std::tuple<RowKernels<double>, RowKernels<float>, RowKernels<BFloat16>, RowKernels<Float16>, RouteKernels<double>,
             RouteKernels<float>>
      kernels;
};

// Compared when a library is opened: it differs if an argument of a kernel was added or removed, or has another size.
constexpr size_t kLayout = [] {
  size_t layout = 0;
  for (const size_t bytes :
       {sizeof(Library), sizeof(RaggedPlan), sizeof(PlanValues), sizeof(Route<float>), sizeof(RouteBackward<float>),
        sizeof(RaggedGather<float>), sizeof(RaggedGatherReduce<float>), sizeof(RaggedGatherReduceOfTwo<float>),
        sizeof(RaggedScatterAdd<float>), sizeof(RaggedDot<float>), sizeof(ActivateRows<float>),
        sizeof(ActivateRowsBackward<float>), sizeof(Gmm<float>), sizeof(Tgmm<float>)}) {
    layout = layout * 31 + bytes;
  }
  return layout;
}();

}  // namespace maxmoe::cuda

// The only exported symbol of the library.
extern "C" __attribute__((visibility("default"))) const maxmoe::cuda::Library* maxmoe_cuda_library();
