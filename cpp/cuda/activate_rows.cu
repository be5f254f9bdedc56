#include "cuda/activation_form.h"

namespace maxmoe::cuda {
namespace {

template <class T, int kWidth, class Form>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 6) activate_elements(const ActivateRows<T> a) {
  const ActivationKind kind = Form::fixed(a.kind);
  const bool has_gate = kind.gate != GateLayout::none;
  const bool alternates = kWidth > 1 && has_gate && a.gate.column_stride == 2;
  for (int64_t row = first_row_of_thread(); row < a.out.rows; row += rows_of_all_blocks()) {
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < a.out.columns; c += int64_t{blockDim.x} * kWidth) {
      T gate[kWidth] = {};
      T up[kWidth];
      if (alternates) {
        load_alternating(a.gate.row(row) + 2 * c, gate, up);
      } else {
        if (has_gate) load(a.gate.row(row) + c * a.gate.column_stride, gate);
        load(a.up.row(row) + c * a.up.column_stride, up);
      }
      T out[kWidth];
      MAXMOE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const auto f = activate_pair<typename Form::template Math<T>, false>(kind, to_wide(gate[i]), to_wide(up[i]));
        out[i] = to_narrow<T>(f.activated);
      }
      store(a.out.row(row) + c, out);
    }
  }
}

}  // namespace

template <class T>
void activate_rows(const ActivateRows<T>& a, Stream stream) {
  if (a.out.rows == 0 || a.out.columns == 0) return;
  const bool is_vectorized = are_vectors(a.kind, a.gate, a.up) && is_aligned(a.out);
  with_width_and_form<T>(is_vectorized, a.kind, [&]<int kWidth, class Form>() {
    const dim3 threads = block_of_rows(a.out.columns / kWidth);
    launch("activate_rows", activate_elements<T, kWidth, Form>, grid_of(a.out.rows, threads.y), threads, 0, stream, a);
  });
}

MAXMOE_INSTANTIATE_CUDA(activate_rows, ActivateRows)

}  // namespace maxmoe::cuda
