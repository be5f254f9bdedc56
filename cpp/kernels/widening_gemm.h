// Products of 16-bit matrices through a float32 Gemm, for processors without 16-bit products.
#pragma once

#include <algorithm>

#include "convert.h"
#include "gemm.h"

namespace maxmoe {

template <class T>
class WideningGemm final : public Gemm<T> {
 public:
  // `gemm` outlives this object and uses no scratch memory.
  explicit WideningGemm(const Gemm<float>& gemm) : gemm_(gemm) {}

  void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) const override {
    for (int64_t begin = 0; begin < c.columns; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, c.columns);
      multiply_columns(a, b.column_range(begin, end), c.column_range(begin, end), accumulate);
    }
  }

 private:
  // Bounds the copies of a and b; converting costs O(1 / kBlock) of the product.
  static constexpr int64_t kBlock = 512;

  void multiply_columns(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) const {
    const MatrixView<float> sum{scratch<float>(kGemmScratch, c.rows * c.columns), c.rows, c.columns, c.columns};
    if (accumulate) widen_matrix(Widen<T>{c.as_const(), sum}, serial_);
    if (a.columns == 0) gemm_.multiply({nullptr, c.rows, 0, 1}, {nullptr, 0, c.columns, c.columns}, sum, accumulate);
    for (int64_t begin = 0; begin < a.columns; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, a.columns);
      const auto wide_a = widened(a.column_range(begin, end), kGemmScratch + 1);
      const auto wide_b = widened(b.row_range(begin, end), kGemmScratch + 2);
      gemm_.multiply(wide_a.as_const(), wide_b.as_const(), sum, accumulate || begin > 0);
    }
    narrow_matrix(Narrow<T>{sum.as_const(), c}, serial_);
  }

  MatrixView<float> widened(ConstMatrixView<T> source, int slot) const {
    MatrixView<float> target{scratch<float>(slot, source.rows * source.columns), source.rows, source.columns, 1, 1};
    (source.column_stride == 1 ? target.row_stride : target.column_stride) =
        source.column_stride == 1 ? source.columns : source.rows;
    widen_matrix(Widen<T>{source, target}, serial_);
    return target;
  }

  const Gemm<float>& gemm_;
  SerialExecutor serial_;
};

}  // namespace maxmoe
