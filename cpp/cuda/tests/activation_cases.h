// Gate and up of rows in every layout, for the tests of the activation kernels.
#pragma once

#include "emulated.h"
#include "naive_ffn.h"

namespace maxmoe {

// Calls check(kind, columns, gap) for every activation, with rows of single numbers and of vectors.
template <class Check>
void for_every_activation(const Check& check) {
  for (const ActivationKind& kind : activation_kinds()) {
    for (const int64_t gap : kGaps) {
      for (const int64_t columns : {8, 33, 264}) {
        SCOPED_TRACE(testing::Message() << "activation " << static_cast<int>(kind.activation) << ", layout "
                                        << static_cast<int>(kind.gate) << ", " << columns << " columns, gap " << gap);
        check(kind, columns, gap);
      }
    }
  }
}

// Gate and up in the memory of one or two matrices.
template <class T>
struct GateAndUp {
  GateAndUp(GateLayout gate_layout, int64_t rows, int64_t columns, int64_t gap)
      : layout(gate_layout),
        width(columns),
        memory(Matrix<T>::random(rows, is_fused() ? 2 * columns : columns, 11, gap)),
        separate_gate(Matrix<T>::random(rows, columns, 12, gap)) {}

  bool is_fused() const { return layout == GateLayout::concatenated || layout == GateLayout::interleaved; }
  MatrixView<T> part(bool is_up) {
    if (!is_fused()) return is_up ? memory.view() : separate_gate.view();
    const PreactivationColumns columns = preactivation_columns(layout, width, 0);
    MatrixView<T> view = memory.view();
    view.data += is_up ? columns.up : columns.gate;
    view.columns = width;
    view.column_stride = columns.stride;
    return view;
  }
  MatrixView<T> gate() { return layout == GateLayout::none ? MatrixView<T>{} : part(false); }
  MatrixView<T> up() { return part(true); }
  double value(bool is_up, int64_t r, int64_t c) {
    const MatrixView<T> view = part(is_up);
    return widen(view.row(r)[c * view.column_stride]);
  }

  GateLayout layout;
  int64_t width;
  Matrix<T> memory;
  Matrix<T> separate_gate;
};

}  // namespace maxmoe
