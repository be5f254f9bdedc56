#include "cuda/activation_form.h"

namespace maxmoe::cuda {
namespace {

// One warp for each row, because the gradient of a weight is a sum over its row.
template <class T, int kWidth, class Form>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 3) backward_of_rows(const ActivateRowsBackward<T> a) {
  using S = Accumulator<T>;
  const ActivationKind kind = Form::fixed(a.kind);
  const bool has_gate = kind.gate != GateLayout::none;
  const bool alternates = kWidth > 1 && has_gate && a.gate.column_stride == 2;
  const bool wants_activated = a.activated.data != nullptr;
  for (int64_t row = first_item_of_warp(); row < a.up.rows; row += items_of_all_warps()) {
    const S weight = a.weights == nullptr ? S(1) : a.weights[row];
    S product = 0;
    for (int64_t c = lane_index() * kWidth; c < a.up.columns; c += kWarp * kWidth) {
      T* const gate_row = a.gate.row(row) + c * a.gate.column_stride;
      T* const up_row = a.up.row(row) + c * a.up.column_stride;
      T grad[kWidth];
      T gate[kWidth] = {};
      T up[kWidth];
      T activated[kWidth];
      load(a.grad.row(row) + c, grad);
      if (alternates) {
        load_alternating<T>(gate_row, gate, up);
      } else {
        if (has_gate) load<T>(gate_row, gate);
        load<T>(up_row, up);
      }
      MAXMOE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const auto f = activate_pair<typename Form::template Math<T>, true>(kind, to_wide(gate[i]), to_wide(up[i]));
        const S wide = to_wide(grad[i]);
        product += wide * f.activated;
        activated[i] = to_narrow<T>(weight * f.activated);
        gate[i] = to_narrow<T>(weight * wide * f.gate_slope);
        up[i] = to_narrow<T>(weight * wide * f.up_slope);
      }
      if (alternates) {
        store_alternating(gate_row, gate, up);
      } else {
        if (has_gate) store(gate_row, gate);
        store(up_row, up);
      }
      if (wants_activated) store(a.activated.row(row) + c, activated);
    }
    if (a.grad_weights == nullptr) continue;
    product = warp_sum(product);
    if (lane_index() == 0) a.grad_weights[row] = product;
  }
}

}  // namespace

template <class T>
void activate_rows_backward(const ActivateRowsBackward<T>& a, Stream stream) {
  if (a.up.rows == 0) return;
  const bool wants_activated = a.activated.data != nullptr;
  const bool is_vectorized =
      is_aligned(a.grad) && are_vectors(a.kind, a.gate, a.up) && (!wants_activated || is_aligned(a.activated));
  with_width_and_form<T>(is_vectorized, a.kind, [&]<int kWidth, class Form>() {
    launch("activate_rows_backward", backward_of_rows<T, kWidth, Form>, grid_of(a.up.rows, kWarpsPerBlock), kThreads, 0,
           stream, a);
  });
}

MAXMOE_INSTANTIATE_CUDA(activate_rows_backward, ActivateRowsBackward)

}  // namespace maxmoe::cuda
