#include "eigen_products.h"

#include <Eigen/Core>

#include "kernels/matrix/dtype.h"

namespace maxmoe {
namespace {

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
class EigenGemm final : public Gemm<T> {
 public:
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
  using Storage = RowMajor<Accumulator<T>>;

  static Storage widened(GemmOperand<T> m) {
    Storage wide(m.memory.rows, m.memory.columns);
    for (int64_t i = 0; i < m.memory.rows; ++i) {
      for (int64_t j = 0; j < m.memory.columns; ++j) wide(i, j) = widen(m.memory_row(i)[j]);
    }
    return m.is_transposed ? Storage(wide.transpose()) : wide;
  }
};

}  // namespace

template <class T>
const Gemm<T>& test_gemm() {
  static const EigenGemm<T> gemm;
  return gemm;
}

template const Gemm<float>& test_gemm();
template const Gemm<double>& test_gemm();
template const Gemm<BFloat16>& test_gemm();
template const Gemm<Float16>& test_gemm();

std::vector<double> eigen_product(const std::vector<double>& a, const std::vector<double>& b, int64_t rows,
                                  int64_t depth, int64_t columns) {
  std::vector<double> product(static_cast<size_t>(rows * columns));
  using Map = Eigen::Map<const RowMajor<double>>;
  Eigen::Map<RowMajor<double>>(product.data(), rows, columns).noalias() =
      Map(a.data(), rows, depth) * Map(b.data(), depth, columns);
  return product;
}

}  // namespace maxmoe
