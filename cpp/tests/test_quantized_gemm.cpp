// Tests of tile_gemm with a quantized b: the same bits as with the dequantized matrix in the same layout.
#include <gtest/gtest.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels/product/tiled/tile_gemm.h"
#include "quantized.h"

MAXMOE_DECLARE_KERNEL(pairs, tile_gemm, TileGemm)

namespace maxmoe {
namespace {

template <class T>
void multiply(const GemmOperand<T>& a, const Product<T>& product) {
  KernelGemm<T>().multiply(a, product);
}

// Compares products of a [rows, depth] and b [depth, columns]. The rows of codes run along the columns of b, or along
// the inner dimension if `is_transposed`.
struct Sizes {
  int64_t rows;
  int64_t depth;
  int64_t columns;
};

template <class T, class Multiply>
void check_product(const QuantizedFormat& format, Sizes s, bool is_transposed, Scales scales,
                   const Multiply& multiply) {
  SCOPED_TRACE(testing::Message() << text(format) << ", [" << s.rows << ", " << s.depth << "] x [" << s.depth << ", "
                                  << s.columns << "]" << (is_transposed ? ", transposed" : "")
                                  << (scales == Scales::any ? ", any scales" : ""));
  const auto a = Matrix<T>::random(s.rows, s.depth, 1);
  const QuantizedTestMatrix b(format, is_transposed ? s.columns : s.depth, is_transposed ? s.depth : s.columns, scales,
                              2, scales == Scales::any);
  const Matrix<T> dense = b.dequantized<T>();
  const ConstMatrixView<T> view = dense.view();
  const auto before = Matrix<T>::random(s.rows, s.columns, 3);
  for (const bool accumulate : {false, true}) {
    Matrix<T> got = accumulate ? before : Matrix<T>(s.rows, s.columns);
    Matrix<T> want = got;
    multiply(a.view(), Product<T>{GemmOperand<T>(b.view(), is_transposed), got.view(), accumulate});
    multiply(a.view(), Product<T>{is_transposed ? view.transposed() : view, want.view(), accumulate});
    expect_same_numbers(got, want);
    EXPECT_TRUE(got.gap_is_intact());
  }
}

// Compares products whose elements of a, and of c before, have magnitudes of powers of two.
void check_magnitudes(const QuantizedFormat& format, int64_t rows, int exponent_of_a, int exponent_of_c) {
  SCOPED_TRACE(testing::Message() << rows << " rows, a 2^" << exponent_of_a << ", c 2^" << exponent_of_c);
  constexpr int64_t kDepth = 300;
  constexpr int64_t kColumns = 96;
  const auto scaled = [](Matrix<BFloat16> matrix, int exponent) {
    for (int64_t r = 0; r < matrix.rows(); ++r) {
      for (int64_t c = 0; c < matrix.columns(); ++c) {
        matrix.element(r, c) = narrow<BFloat16>(std::ldexp(widen(matrix.element(r, c)), exponent));
      }
    }
    return matrix;
  };
  auto a = Matrix<BFloat16>::random(rows, kDepth, 1);
  // Zeros, and one number of another magnitude than the others.
  for (int64_t i = 0; i < kDepth; i += 5) a.element(0, i) = narrow<BFloat16>(0.0F);
  a = scaled(a, exponent_of_a);
  a.element(rows - 1, 77) = narrow<BFloat16>(1.5F);
  const Matrix<BFloat16>& of_a = a;
  const auto before = scaled(Matrix<BFloat16>::random(rows, kColumns, 3), exponent_of_c);
  for (const Scales scales : {Scales::moderate, Scales::any}) {
    const QuantizedTestMatrix b(format, kColumns, kDepth, scales, 2);
    const Matrix<BFloat16> dense = b.dequantized<BFloat16>();
    const ConstMatrixView<BFloat16> view = dense.view();
    for (const bool accumulate : {false, true}) {
      Matrix<BFloat16> got = before;
      Matrix<BFloat16> want = before;
      multiply<BFloat16>(of_a.view(), {GemmOperand<BFloat16>(b.view(), true), got.view(), accumulate});
      multiply<BFloat16>(of_a.view(), {view.transposed(), want.view(), accumulate});
      expect_same_numbers(got, want);
    }
  }
}

template <class T>
class QuantizedGemmTest : public testing::Test {
 protected:
  static void check(const QuantizedFormat& format, Sizes sizes, Scales scales = Scales::moderate) {
    for (const bool is_transposed : {false, true}) {
      check_product<T>(format, sizes, is_transposed, scales, multiply<T>);
    }
  }
};
TYPED_TEST_SUITE(QuantizedGemmTest, Dtypes, DtypeNames);

TYPED_TEST(QuantizedGemmTest, EveryNumberOfRows) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (int64_t rows = 0; rows <= 30; ++rows) {
      this->check(format, {rows, 1 + rows * 13 % 70, 1 + rows * 29 % 70});
      this->check(format, {rows, 1 + rows * 31 % 70, 1 + rows * 17 % 70}, Scales::any);
    }
  }
}

TYPED_TEST(QuantizedGemmTest, EveryDepthAndNumberOfColumns) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (int64_t size = 0; size <= 70; ++size) {
      for (const int64_t rows : {1, 5, 14}) {
        this->check(format, {rows, size, 33});
        this->check(format, {rows, 33, size});
      }
    }
  }
}

TYPED_TEST(QuantizedGemmTest, MoreThanOneBlock) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const int64_t rows : {2, 7, 20}) {
      this->check(format, {rows, 1100, 65});
      this->check(format, {rows, 65, 1100}, Scales::any);
    }
  }
}

TYPED_TEST(QuantizedGemmTest, MoreThanOneOuterBlock) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const int64_t rows : {1, 13}) {
      this->check(format, {rows, 4131, 33});
      this->check(format, {rows, 33, 2081});
    }
  }
}

// Scales of E2M1 that are far apart, with rows of A and sums that are so small or large that one of both products, with
// scaled weights or with scaled sums, would leave the normal numbers.
TEST(QuantizedGemm, NumbersOfAllMagnitudes) {
  const QuantizedFormat format{&Mxfp4::kCodes, ScaleType::e8m0, 0, 5, false};
  for (const int exponent_of_a : {-133, -126, -118, -100, -60, -20, 0, 20, 60, 100, 118, 127}) {
    for (const int exponent_of_c : {-133, -120, -100, -60, 0, 60, 100, 127}) {
      for (const int64_t rows : {1, 3}) {
        check_magnitudes(format, rows, exponent_of_a, exponent_of_c);
      }
    }
  }
}

#if defined(__SSE2__)
// Subnormal codes of E4M3 are not zeros, even if the thread takes subnormal operands as zeros, as after
// torch.set_flush_denormal(True).
TYPED_TEST(QuantizedGemmTest, SubnormalOperandsAreZeros) {
  const unsigned int before = _mm_getcsr();
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const int64_t rows : {1, 5, 14}) this->check(format, {rows, 70, 33});
  }
  _mm_setcsr(before);
}
#endif

// Ranges of columns of b, as kernels give them to threads. Rows of codes may begin anywhere, and columns of codes at
// multiples of the width of a panel.
TYPED_TEST(QuantizedGemmTest, RangesOfColumns) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const bool is_transposed : {false, true}) {
      for (const int64_t rows : {3, 9, 20}) {
        const auto a = Matrix<TypeParam>::random(rows, 200, 1);
        const QuantizedTestMatrix b(format, 200, 200, Scales::moderate, 2);
        const GemmOperand<TypeParam> whole(b.view(), is_transposed);
        Matrix<TypeParam> got(rows, 200);
        Matrix<TypeParam> want(rows, 200);
        multiply<TypeParam>(a.view(), {whole, want.view(), false});
        const int64_t border = is_transposed ? 37 : 64;
        multiply<TypeParam>(a.view(), {whole.column_range(0, border), got.view().column_range(0, border), false});
        multiply<TypeParam>(a.view(), {whole.column_range(border, 200), got.view().column_range(border, 200), false});
        EXPECT_TRUE(got.has_same_bits(want));
      }
    }
  }
}

// tile_gemm with pairs in plain arithmetic: see test_pairs.cpp.
TEST(Pairs, QuantizedB) {
  const auto multiply_pairs = [](const GemmOperand<BFloat16>& a, const Product<BFloat16>& product) {
    pairs::tile_gemm(TileGemm<BFloat16>{a, &product, 1}, SerialExecutor());
  };
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (const bool is_transposed : {false, true}) {
      for (const Scales scales : {Scales::moderate, Scales::any}) {
        for (const int64_t rows : {1, 5, 14}) {
          for (const int64_t size : {1, 17, 31, 64, 70}) {
            check_product<BFloat16>(format, {rows, size, 71 - size}, is_transposed, scales, multiply_pairs);
          }
        }
        check_product<BFloat16>(format, {14, 2049, 33}, is_transposed, scales, multiply_pairs);
      }
    }
  }
}

}  // namespace
}  // namespace maxmoe
