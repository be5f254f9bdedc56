// Eigen's matrix product for the kernels; the 16-bit types go through float32.
#pragma once

#include <Eigen/Core>
#include <type_traits>

#include "kernels/gemm.h"
#include "kernels/widening_gemm.h"

namespace maxmoe {

template <class T>
class EigenGemm final : public Gemm<T> {
 public:
  void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) const override {
    if (accumulate) {
      map(c) += map(a) * map(b);
    } else {
      map(c) = map(a) * map(b);
    }
  }

 private:
  using Stride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  using Storage = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  static auto map(MatrixView<T> m) {
    return Eigen::Map<Storage, 0, Stride>(m.data, m.rows, m.columns, Stride(m.row_stride, m.column_stride));
  }
  static auto map(ConstMatrixView<T> m) {
    return Eigen::Map<const Storage, 0, Stride>(m.data, m.rows, m.columns, Stride(m.row_stride, m.column_stride));
  }
};

// The product that lives as long as the program.
template <class T>
const Gemm<T>& test_gemm() {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    static const EigenGemm<T> gemm;
    return gemm;
  } else {
    static const EigenGemm<float> wide;
    static const WideningGemm<T> gemm(wide);
    return gemm;
  }
}

}  // namespace maxmoe
