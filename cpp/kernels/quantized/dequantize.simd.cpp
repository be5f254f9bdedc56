// A task dequantizes some rows of one matrix.
#include "kernels/quantized/dequantize.h"

#include "kernels/quantized/decode_rows.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

template <class T>
void dequantize(const Dequantize<T>& a, const Executor& executor) {
  constexpr int64_t kRowsPerTask = 64;
  const int64_t rows = a.stack.first.rows;
  const int64_t columns = a.stack.first.columns;
  const int64_t tasks_per_matrix = (rows + kRowsPerTask - 1) / kRowsPerTask;
  const auto task = [&](int64_t index) {
    const int64_t matrix = index / tasks_per_matrix;
    const QuantizedMatrix m = a.stack[matrix];
    const Range range = range_from(index % tasks_per_matrix * kRowsPerTask, kRowsPerTask, rows);
    T* const target = a.out + (matrix * rows + range.begin) * columns;
    decode_rows(m, range, {0, columns}, MatrixView<T>{target, range.size(), columns, columns}, 0);
  };
  run_tasks(executor, a.stack.count * tasks_per_matrix, a.stack.count * rows * columns, Task(task));
}

MAXMOE_INSTANTIATE(dequantize, Dequantize)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
