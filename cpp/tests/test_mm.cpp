// out = a * b + bias for matrices of any dtypes
#include "kernels/mm.h"

#include <gtest/gtest.h>

#include "eigen_gemm.h"
#include "kernels/tile_gemm.h"
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
  bool is_transposed_a = false;
  bool is_transposed_b = false;
};

// Matrices of A and B, summed in the wider of both: Out is what the result is rounded to.
template <class A, class B, class Out>
void check(const Case& c) {
  using S = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;
  SCOPED_TRACE(testing::Message() << dtype_name<A>() << ", " << dtype_name<B>() << ", " << dtype_name<Out>() << ": "
                                  << c.rows << " x " << c.inner << " x " << c.columns << (c.has_bias ? ", bias" : "")
                                  << (c.is_transposed_a ? ", a^T" : "") << (c.is_transposed_b ? ", b^T" : ""));
  const auto a = c.is_transposed_a ? Matrix<A>::random(c.inner, c.rows, 1) : Matrix<A>::random(c.rows, c.inner, 1);
  const auto b =
      c.is_transposed_b ? Matrix<B>::random(c.columns, c.inner, 2) : Matrix<B>::random(c.inner, c.columns, 2);
  const auto bias = Matrix<S>::random(1, c.columns, 3);
  const auto out = run_kernel<Out>(c.rows, c.columns, [&](MatrixView<Out> view, const Executor& executor) {
    mm(Mm<S>{any_matrix(c.is_transposed_a ? a.view().transposed() : a.view()),
             any_matrix(c.is_transposed_b ? b.view().transposed() : b.view()), c.has_bias ? bias.view().data : nullptr,
             &test_gemm<S>(), any_matrix(view)},
       executor);
  });
  const auto want = [&](int64_t m, int64_t n) {
    double sum = c.has_bias ? bias(0, n) : 0.0;
    for (int64_t k = 0; k < c.inner; ++k) {
      sum += (c.is_transposed_a ? a(k, m) : a(m, k)) * (c.is_transposed_b ? b(n, k) : b(k, n));
    }
    return sum;
  };
  expect_near(out, want);
}

template <class T>
class MmTest : public testing::Test {};
TYPED_TEST_SUITE(MmTest, Dtypes, DtypeNames);

TYPED_TEST(MmTest, MatchesTheLoop) {
  for (const int64_t rows : {1, 5}) {
    for (const int64_t inner : {0, 1, 17}) {
      for (const int64_t columns : {1, 9}) {
        for (const bool has_bias : {false, true}) {
          for (const bool is_transposed : {false, true}) {
            check<TypeParam, TypeParam, TypeParam>({rows, inner, columns, has_bias, is_transposed, is_transposed});
          }
        }
      }
    }
  }
}

TYPED_TEST(MmTest, OtherTypesBesideIt) {
  for (const bool is_transposed : {false, true}) {
    const Case c{3, 40, 21, true, is_transposed, is_transposed};
    check<TypeParam, float, float>(c);
    check<float, TypeParam, float>(c);
    check<TypeParam, double, TypeParam>(c);
    check<float, float, TypeParam>(c);
    check<BFloat16, Float16, TypeParam>(c);
  }
}

TYPED_TEST(MmTest, LargerThanOneTaskAndOneBlock) {
  check<TypeParam, TypeParam, float>({267, 3, 259, true, false, true});
  check<TypeParam, TypeParam, TypeParam>({3, 515, 7, true, true, false});
  check<TypeParam, TypeParam, TypeParam>({3, 515, 7, false, false, true});
}

// The bits of a row do not depend on the rows beside it.
TYPED_TEST(MmTest, RowsAlone) {
  using S = Accumulator<TypeParam>;
  const KernelGemm<S> gemm;
  const auto a = Matrix<TypeParam>::random(300, 300, 1);
  const auto b = Matrix<TypeParam>::random(40, 300, 2);
  const auto multiply = [&](int64_t begin, int64_t end) {
    return run_kernel<S>(end - begin, 40, [&](MatrixView<S> view, const Executor& executor) {
      mm(Mm<S>{any_matrix(a.view().row_range(begin, end)), any_matrix(b.view().transposed()), nullptr, &gemm,
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
