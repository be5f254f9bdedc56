// Eigen's matrix product in the accumulator's type, as an independent Gemm for the kernels under test. It reports that
// its bits depend on the tiles, so that these tests also cover a tiling that does not depend on the threads.
#pragma once

#include <Eigen/Core>

#include "kernels/dtype.h"
#include "kernels/gemm.h"

namespace maxmoe {

template <class T>
class EigenGemm final : public Gemm<T> {
 public:
  bool bits_depend_on_tiles() const override { return true; }

  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    for (int64_t i = 0; i < count; ++i) {
      const MatrixView<T>& c = products[i].c;
      Storage product = widened(a) * widened(products[i].b);
      if (products[i].accumulate) product += widened(c.as_const());
      if (products[i].has_low_rank_term()) {
        product += widened(GemmOperand<T>(products[i].reduced)) * widened(GemmOperand<T>(products[i].expand));
      }
      for (int64_t r = 0; r < c.rows; ++r) {
        for (int64_t f = 0; f < c.columns; ++f) c.row(r)[f] = narrow<T>(product(r, f));
      }
    }
  }

 private:
  using Storage = Eigen::Matrix<Accumulator<T>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  static Storage widened(GemmOperand<T> m) {
    Storage wide(m.memory.rows, m.memory.columns);
    for (int64_t i = 0; i < m.memory.rows; ++i) {
      for (int64_t j = 0; j < m.memory.columns; ++j) wide(i, j) = widen(m.memory_row(i)[j]);
    }
    return m.is_transposed ? Storage(wide.transpose()) : wide;
  }
};

// The instance that all tests of a type share.
template <class T>
const Gemm<T>& test_gemm() {
  static const EigenGemm<T> gemm;
  return gemm;
}

}  // namespace maxmoe
