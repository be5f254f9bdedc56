#include "mm.h"

#include "row.h"
#include "transpose.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Columns of the result per task, and elements of the inner dimension that are converted at a time: a block of b takes
// 256 KiB in float32, a block of a at most 264 KiB.
constexpr int64_t kColumnsPerTask = 256;
constexpr int64_t kDepth = 256;

// The scratch memory of blocks.
constexpr int kAScratch = 0;
constexpr int kBScratch = 1;
constexpr int kOutScratch = 2;

// Calls body(view) with the matrix in its own dtype.
template <class Data, class Body>
auto with_dtype(const AnyMatrix<Data>& m, const Body& body) {
  const auto view = [&]<class T>(T* data) {
    return MatrixView<T>{data, m.rows, m.columns, m.row_stride, m.column_stride};
  };
  const auto call = [&]<class T>() {
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

// target = source in T
template <class T, class U>
void read_row(const U* source, T* target, int64_t count) {
  if constexpr (std::is_same_v<T, U>) {
    copy_row(source, target, count);
  } else if constexpr (std::is_same_v<T, Accumulator<U>>) {
    widen_row(source, target, count);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = static_cast<T>(widen(source[i]));
  }
}

// target = source in U
template <class U, class T>
void write_row(const T* source, U* target, int64_t count) {
  if constexpr (std::is_same_v<T, Accumulator<U>>) {
    narrow_row(source, target, count);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = narrow<U>(static_cast<Accumulator<U>>(source[i]));
  }
}

// The block in T, in its own layout: where it lies, or converted in scratch memory.
template <class T, class U>
ConstMatrixView<T> converted(ConstMatrixView<U> block, int slot) {
  if constexpr (std::is_same_v<T, U>) {
    return block;
  } else {
    if (block.column_stride != 1) return converted<T>(block.transposed(), slot).transposed();
    const MatrixView<T> target{scratch<T>(slot, block.rows * block.columns), block.rows, block.columns, block.columns};
    for (int64_t r = 0; r < block.rows; ++r) read_row(block.row(r), target.row(r), block.columns);
    return target.as_const();
  }
}

// The block in T, row-major: a Gemm reads b in place for few rows of a that are.
template <class T, class U>
ConstMatrixView<T> converted_rows(ConstMatrixView<U> block, int slot) {
  if (block.column_stride == 1) return converted<T>(block, slot);
  const MatrixView<T> target{scratch<T>(slot, block.rows * block.columns), block.rows, block.columns, block.columns};
  const ConstMatrixView<U> source = block.transposed();
  const auto read = [&](int64_t r, int64_t c, int64_t count, T* buffer) { read_row(source.row(r) + c, buffer, count); };
  transpose_rows(source.rows, source.columns, read, target.data, target.row_stride);
  return target.as_const();
}

// c = a * b + bias for rows of a and columns of b.
template <class T>
void multiply(const Mm<T>& p, int64_t row, int64_t row_end, int64_t column, int64_t column_end, MatrixView<T> c) {
  const bool has_bias = p.bias != nullptr;
  for (int64_t r = 0; r < c.rows && has_bias; ++r) copy_row(p.bias + column, c.row(r), c.columns);
  for (int64_t k = 0; k < p.a.columns || k == 0; k += kDepth) {
    const int64_t k_end = at_most(p.a.columns, k + kDepth);
    const auto a = with_dtype(p.a, [&]<class U>(ConstMatrixView<U> whole) {
      return converted_rows<T>(whole.row_range(row, row_end).column_range(k, k_end), kAScratch);
    });
    const auto b = with_dtype(p.b, [&]<class U>(ConstMatrixView<U> whole) {
      return converted<T>(whole.row_range(k, k_end).column_range(column, column_end), kBScratch);
    });
    p.gemm->multiply(a, b, c, has_bias || k > 0);
  }
}

}  // namespace

template <class T>
void mm(const Mm<T>& p, const Executor& executor) {
  const int64_t row_tasks = (p.out.rows + kMC - 1) / kMC;
  const int64_t column_tasks = (p.out.columns + kColumnsPerTask - 1) / kColumnsPerTask;
  const auto task = [&](int64_t index) {
    const int64_t row = index / column_tasks * kMC;
    const int64_t row_end = at_most(p.out.rows, row + kMC);
    const int64_t column = index % column_tasks * kColumnsPerTask;
    const int64_t column_end = at_most(p.out.columns, column + kColumnsPerTask);
    with_dtype(p.out, [&]<class U>(MatrixView<U> whole) {
      const MatrixView<U> out = whole.row_range(row, row_end).column_range(column, column_end);
      if constexpr (std::is_same_v<T, U>) {
        multiply(p, row, row_end, column, column_end, out);
      } else {
        const MatrixView<T> sums{scratch<T>(kOutScratch, out.rows * out.columns), out.rows, out.columns, out.columns};
        multiply(p, row, row_end, column, column_end, sums);
        for (int64_t r = 0; r < out.rows; ++r) write_row(sums.row(r), out.row(r), out.columns);
      }
    });
  };
  run_tasks(executor, row_tasks * column_tasks, p.out.rows * p.out.columns * p.a.columns, Task(task));
}

template void mm<double>(const Mm<double>&, const Executor&);
template void mm<float>(const Mm<float>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
