// A task dequantizes some rows of one matrix.
#include "dequantize.h"

#include "decode.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

constexpr int64_t kRowsPerTask = 64;

template <class T>
void store_decoded(VectorX2<float> values, T* target) {
  if constexpr (std::is_same_v<T, double>) {
    float wide[kDecodedColumns];
    store_narrowed_x2<float>(static_cast<float*>(wide), values);
    for (int64_t i = 0; i < kDecodedColumns; ++i) target[i] = static_cast<double>(wide[i]);
  } else {
    store_narrowed_x2<T>(target, values);
  }
}

// The order of the lanes is that of T, but for double, which is converted from float.
template <class T>
using OrderOf = std::conditional_t<std::is_same_v<T, double>, float, T>;

template <class T, class Decoder>
void dequantize_row(const QuantizedMatrix& m, const Decoder& decoder, int64_t row, T* out) {
  int64_t column = 0;
  for (; column + kDecodedColumns <= m.columns; column += kDecodedColumns) {
    store_decoded(decode_x2<OrderOf<T>>(m, decoder, row, column), out + column);
  }
  if (column == m.columns) return;
  T last[kDecodedColumns];
  store_decoded(decode_x2<OrderOf<T>>(m, decoder, row, column), static_cast<T*>(last));
  copy_row(static_cast<const T*>(last), out + column, m.columns - column);
}

}  // namespace

template <class T>
void dequantize(const Dequantize<T>& a, const Executor& executor) {
  const int64_t rows = a.stack.first.rows;
  const int64_t columns = a.stack.first.columns;
  const int64_t tasks_per_matrix = (rows + kRowsPerTask - 1) / kRowsPerTask;
  const auto task = [&](int64_t index) {
    const int64_t matrix = index / tasks_per_matrix;
    const QuantizedMatrix m = a.stack[matrix];
    const Range range = range_from(index % tasks_per_matrix * kRowsPerTask, kRowsPerTask, rows);
    with_decoder(m, [&](const auto& decoder) {
      for (int64_t row = range.begin; row < range.end; ++row) {
        dequantize_row(m, decoder, row, a.out + (matrix * rows + row) * columns);
      }
    });
  };
  run_tasks(executor, a.stack.count * tasks_per_matrix, a.stack.count * rows * columns, Task(task));
}

MAXMOE_INSTANTIATE(dequantize, Dequantize)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
