// Tests of linear: out = x * weight^T + bias for matrices of any dtypes.
#include "kernels/product/linear.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "eigen_products.h"
#include "kernels/product/tiled/tile_gemm.h"
#include "matrix.h"

namespace maxmoe {
namespace {

template <class T>
constexpr Dtype kDtypeOf = std::is_same_v<T, double>     ? Dtype::float64
                           : std::is_same_v<T, float>    ? Dtype::float32
                           : std::is_same_v<T, BFloat16> ? Dtype::bfloat16
                                                         : Dtype::float16;

template <class T>
AnyMatrix<const void> any_matrix(ConstMatrixView<T> m) {
  return {m.data, kDtypeOf<T>, m.rows, m.columns, m.row_stride, m.column_stride};
}

template <class T>
AnyMatrix<void> any_matrix(MatrixView<T> m) {
  return {m.data, kDtypeOf<T>, m.rows, m.columns, m.row_stride, m.column_stride};
}

struct Case {
  int64_t rows;
  int64_t inner;
  int64_t columns;
  bool has_bias = true;
  bool is_transposed = false;  // both matrices, as in the gradient of the weight
};

template <class T>
ConstMatrixView<T> view_of(const Matrix<T>& matrix, bool is_transposed) {
  return is_transposed ? matrix.view().transposed() : matrix.view();
}

// Checks x in X and weight in Weight, summed in the wider accumulator of both, with the result rounded to Out.
template <class X, class Weight, class Out>
void check(const Case& c) {
  using S = std::conditional_t<std::is_same_v<X, double> || std::is_same_v<Weight, double>, double, float>;
  SCOPED_TRACE(testing::Message() << dtype_name<X>() << ", " << dtype_name<Weight>() << ", " << dtype_name<Out>()
                                  << ": " << c.rows << " x " << c.inner << " x " << c.columns
                                  << (c.has_bias ? ", bias" : "") << (c.is_transposed ? ", transposed" : ""));
  const auto random = [&]<class T>(int64_t rows, unsigned seed) {
    return c.is_transposed ? Matrix<T>::random(c.inner, rows, seed) : Matrix<T>::random(rows, c.inner, seed);
  };
  const auto x = random.template operator()<X>(c.rows, 1);
  const auto weight = random.template operator()<Weight>(c.columns, 2);
  const auto bias = Matrix<S>::random(1, c.columns, 3);
  const auto out = run_kernel<Out>(c.rows, c.columns, [&](MatrixView<Out> view, const Executor& executor) {
    linear(Linear<S>{any_matrix(view_of(x, c.is_transposed)), any_matrix(view_of(weight, c.is_transposed)),
                     c.has_bias ? bias.view().data : nullptr, &test_gemm<S>(), any_matrix(view)},
           executor);
  });
  const auto want = [&](int64_t t, int64_t e) {
    double sum = c.has_bias ? bias(0, e) : 0.0;
    for (int64_t d = 0; d < c.inner; ++d) {
      sum += c.is_transposed ? x(d, t) * weight(d, e) : x(t, d) * weight(e, d);
    }
    return sum;
  };
  expect_near(out, want, std::max(1.0, tolerance<S>() / tolerance<Out>()));
}

template <class T>
class LinearTest : public testing::Test {};
TYPED_TEST_SUITE(LinearTest, Dtypes, DtypeNames);

TYPED_TEST(LinearTest, MatchesTheLoop) {
  for (const int64_t rows : {1, 5}) {
    for (const int64_t inner : {0, 1, 17}) {
      for (const int64_t columns : {1, 9}) {
        for (const bool has_bias : {false, true}) {
          for (const bool is_transposed : {false, true}) {
            check<TypeParam, TypeParam, TypeParam>({rows, inner, columns, has_bias, is_transposed});
          }
        }
      }
    }
  }
}

TYPED_TEST(LinearTest, OtherTypesBesideIt) {
  for (const bool is_transposed : {false, true}) {
    const Case c{3, 40, 21, true, is_transposed};
    check<TypeParam, float, float>(c);
    check<float, TypeParam, float>(c);
    check<TypeParam, double, TypeParam>(c);
    check<float, float, TypeParam>(c);
    check<BFloat16, Float16, TypeParam>(c);
  }
}

TYPED_TEST(LinearTest, LargerThanOneTaskAndOneBlock) {
  check<TypeParam, TypeParam, float>({267, 3, 259, true, false});
  check<TypeParam, TypeParam, TypeParam>({3, 515, 7, true, true});
  check<TypeParam, TypeParam, TypeParam>({3, 515, 70, false, false});
}

// The bits of a row do not depend on the rows that are multiplied together with it.
TYPED_TEST(LinearTest, RowsAlone) {
  using S = Accumulator<TypeParam>;
  const KernelGemm<S> gemm;
  const auto x = Matrix<TypeParam>::random(300, 300, 1);
  const auto weight = Matrix<TypeParam>::random(40, 300, 2);
  const auto multiply = [&](int64_t begin, int64_t end) {
    return run_kernel<S>(end - begin, 40, [&](MatrixView<S> view, const Executor& executor) {
      linear(Linear<S>{any_matrix(x.view().row_range(begin, end)), any_matrix(weight.view()), nullptr, &gemm,
                       any_matrix(view)},
             executor);
    });
  };
  const auto together = multiply(0, 300);
  for (const int64_t row : {0, 17, 299}) {
    const auto alone = multiply(row, row + 1);
    for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(alone(0, n), together(row, n)) << "row " << row << ", column " << n;
  }
}

}  // namespace
}  // namespace maxmoe
