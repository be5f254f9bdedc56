// A task computes a block of the result. It converts the blocks of x and of the weight that it needs, and calls the
// product in T.
#include "kernels/product/linear.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Rows and columns of the result per task, and elements of the inner dimension that are converted at a time. In float32
// a block of the weight takes 512 KiB, a block of x at most 528 KiB. The numbers of rows and columns are multiples of
// MR and NR for every instruction set, so that only the last tasks have partial micro-tiles.
constexpr int64_t kRowsPerTask = 264;
constexpr int64_t kColumnsPerTask = 256;
constexpr int64_t kDepth = 512;

// With few rows of x, tasks have fewer columns, so that several threads are busy. This needs a weight whose rows are
// contiguous: they are the columns of the product. The number of columns is a multiple of NR for every instruction set,
// and 32 columns were slower.
constexpr int64_t kFewRows = 64;
constexpr int64_t kColumnsPerTaskOfFewRows = 96;

// The scratch slots of a task, one per block.
constexpr int kXScratch = 0;
constexpr int kWeightScratch = 1;
constexpr int kOutScratch = 2;

// Calls body(view) with a view of the matrix in its dtype.
template <class Data, class Body>
auto with_dtype(const AnyMatrix<Data>& m, const Body& body) {
  const auto view = [&]<class T>(T* data) {
    return MatrixView<T>{data, m.rows, m.columns, m.row_stride, m.column_stride};
  };
  const auto call = [&]<class T> {
    using Element = std::conditional_t<std::is_const_v<Data>, const T, T>;
    return body(view(static_cast<Element*>(m.data)));
  };
  switch (m.dtype) {
    case Dtype::float64:
      return call.template operator()<double>();
    case Dtype::float32:
      return call.template operator()<float>();
    case Dtype::bfloat16:
      return call.template operator()<BFloat16>();
    default:
      return call.template operator()<Float16>();
  }
}

// target = source, converted to T, which is another type.
template <class T, class U>
void read_row(const U* source, T* target, int64_t count) {
  if constexpr (std::is_same_v<T, Accumulator<U>>) {
    widen_row(source, target, count);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = static_cast<T>(widen(source[i]));
  }
}

// target = source, converted to U. float64 is rounded to float first, because narrow() takes the accumulator's type.
template <class U, class T>
void write_row(const T* source, U* target, int64_t count) {
  if constexpr (std::is_same_v<T, Accumulator<U>>) {
    narrow_row(source, target, count);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = narrow<U>(static_cast<Accumulator<U>>(source[i]));
  }
}

// The block in T, with the layout unchanged: a view of it if its dtype is T, otherwise a copy in scratch slot `slot`.
template <class T, class U>
ConstMatrixView<T> converted(ConstMatrixView<U> block, int slot) {
  if constexpr (std::is_same_v<T, U>) {
    return block;
  } else {
    // The rows of the transpose are contiguous, so that they can be converted in vectors.
    if (block.column_stride != 1) return converted<T>(block.transposed(), slot).transposed();
    const MatrixView<T> target{scratch<T>(slot, block.rows * block.columns), block.rows, block.columns, block.columns};
    for (int64_t r = 0; r < block.rows; ++r) read_row(block.row(r), target.row(r), block.columns);
    return target.as_const();
  }
}

// Computes c = x * weight^T + bias for a range of rows of x and a range of rows of the weight, the columns of c.
template <class T>
void multiply(const Linear<T>& p, Range rows, Range columns, MatrixView<T> c) {
  const bool has_bias = p.bias != nullptr;
  for (int64_t r = 0; r < c.rows && has_bias; ++r) copy_row(p.bias + columns.begin, c.row(r), c.columns);
  // Block by block of the inner dimension, so that converted blocks stay in the caches and no float32 copy of x is
  // written to memory. c is in T, so that the sums are not rounded between blocks. Runs once if the depth is 0: c must
  // be written.
  for (int64_t d = 0; d < p.x.columns || d == 0; d += kDepth) {
    const int64_t d_end = at_most(p.x.columns, d + kDepth);
    const auto a = with_dtype(p.x, [&]<class U>(ConstMatrixView<U> x) {
      return converted<T>(x.row_range(rows.begin, rows.end).column_range(d, d_end), kXScratch);
    });
    const auto b = with_dtype(p.weight, [&]<class U>(ConstMatrixView<U> weight) {
      return converted<T>(weight.row_range(columns.begin, columns.end).column_range(d, d_end), kWeightScratch);
    });
    p.gemm->multiply(a, {b.transposed(), c, has_bias || d > 0});
  }
}

}  // namespace

template <class T>
void linear(const Linear<T>& p, const Executor& executor) {
  // With a transposed weight, narrow tasks would read short pieces of its rows.
  const bool is_split_finely = p.x.rows <= kFewRows && p.weight.column_stride == 1;
  const int64_t columns_per_task = is_split_finely ? kColumnsPerTaskOfFewRows : kColumnsPerTask;
  const int64_t row_tasks = (p.out.rows + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t column_tasks = (p.out.columns + columns_per_task - 1) / columns_per_task;
  const auto task = [&](int64_t index) {
    const Range rows = range_from(index / column_tasks * kRowsPerTask, kRowsPerTask, p.out.rows);
    const Range columns = range_from(index % column_tasks * columns_per_task, columns_per_task, p.out.columns);
    with_dtype(p.out, [&]<class U>(MatrixView<U> whole) {
      const MatrixView<U> out = whole.row_range(rows.begin, rows.end).column_range(columns.begin, columns.end);
      // A result in another dtype is summed in scratch memory and rounded once.
      if constexpr (std::is_same_v<T, U>) {
        multiply(p, rows, columns, out);
      } else {
        const MatrixView<T> sums{scratch<T>(kOutScratch, out.rows * out.columns), out.rows, out.columns, out.columns};
        multiply(p, rows, columns, sums);
        for (int64_t r = 0; r < out.rows; ++r) write_row(sums.row(r), out.row(r), out.columns);
      }
    });
  };
  run_tasks(executor, row_tasks * column_tasks, p.out.rows * p.out.columns * p.x.columns, Task(task));
}

template void linear<double>(const Linear<double>&, const Executor&);
template void linear<float>(const Linear<float>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
