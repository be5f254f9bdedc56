// Candidates of kernels beside the ones that operators run, for tests/device/rows.py, so that one run on a device
// decides: sums with other numbers of rows ahead, silu without approximations. `make cuda-candidates` builds them.
#include "cuda/activate_rows.cu"
#include "cuda/ragged_gather_reduce.cu"

namespace maxmoe::cuda {

// silu(gate) * up with exp and 1 / x of the CUDA library.
struct ExactSilu : ActivationForm<Activation::silu, true, false> {
  template <class T>
  using Math = NumberMath<Accumulator<T>>;
};

template <class Form>
void activate_with(const ActivateRows<BFloat16>& a, Stream stream) {
  constexpr int kWidth = kVectorWidth<BFloat16>;
  const dim3 threads = block_of_rows(a.out.columns / kWidth);
  launch("candidate", activate_elements<BFloat16, kWidth, Form>, grid_of(a.out.rows, threads.y), threads, 0, stream, a);
}

}  // namespace maxmoe::cuda

// out [T, D] from rows [R, D], K rows each, and out [R, F] from gate and up: contiguous bfloat16. `candidate` is the
// number of rows ahead, and whether functions are approximated.
extern "C" void maxmoe_candidate_of_sum(int candidate, const void* rows, int64_t num_rows, int64_t columns,
                                        const int64_t* index, int64_t group_size, const float* weights, void* out,
                                        int64_t num_groups, void* stream) {
  using namespace maxmoe;
  const RaggedGatherReduce<BFloat16> a{
      {static_cast<const BFloat16*>(rows), num_rows, columns, columns, 1}, index, group_size, weights, nullptr,
      {static_cast<BFloat16*>(out), num_groups, columns, columns, 1}};
  if (candidate == 1) cuda::sum<BFloat16, 1, 1>(a, {}, stream);
  if (candidate == 2) cuda::sum<BFloat16, 1, 2>(a, {}, stream);
  if (candidate == 4) cuda::sum<BFloat16, 1, 4>(a, {}, stream);
  if (candidate == 8) cuda::sum<BFloat16, 1, 8>(a, {}, stream);
}

extern "C" void maxmoe_candidate_of_silu(int candidate, const void* gate, const void* up, void* out, int64_t rows,
                                         int64_t columns, void* stream) {
  using namespace maxmoe;
  const auto view = [&](const void* data) {
    return ConstMatrixView<BFloat16>{static_cast<const BFloat16*>(data), rows, columns, columns, 1};
  };
  const ActivationKind kind{Activation::silu, GateLayout::separate, std::numeric_limits<double>::infinity()};
  const cuda::ActivateRows<BFloat16> a{
      kind, view(gate), view(up), {static_cast<BFloat16*>(out), rows, columns, columns, 1}};
  if (candidate == 0) cuda::activate_with<cuda::ExactSilu>(a, stream);
  if (candidate == 1) cuda::activate_with<cuda::ActivationForm<Activation::silu, true, false>>(a, stream);
}
