// Tests of tile_gemm against Eigen in float64, with sizes around MR, NR, NC and KC.
#include "kernels/product/tiled/tile_gemm.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "products.h"

namespace maxmoe {
namespace {

template <class T>
class TileGemmTest : public testing::Test {
 protected:
  static void check(int64_t rows, int64_t depth, int64_t columns) {
    const auto multiply = [](const GemmOperand<T>& a, const Product<T>& product) {
      KernelGemm<T>().multiply(a, product);
    };
    check_product<T>(multiply, rows, depth, columns);
  }
  static void check_low_rank(int64_t rows, int64_t depth, int64_t columns, int64_t rank) {
    const auto multiply = [](const GemmOperand<T>& a, const Product<T>& product) {
      KernelGemm<T>().multiply(a, product);
    };
    check_low_rank_product<T>(multiply, rows, depth, columns, rank);
  }
};
TYPED_TEST_SUITE(TileGemmTest, Dtypes, DtypeNames);

TYPED_TEST(TileGemmTest, EveryNumberOfRowsAndColumns) {
  for (int64_t rows = 1; rows <= 70; ++rows) {
    for (int64_t columns = 1; columns <= 70; ++columns) this->check(rows, 1 + (rows * 7 + columns * 3) % 9, columns);
  }
}

TYPED_TEST(TileGemmTest, EveryDepth) {
  for (int64_t depth = 0; depth <= 70; ++depth) {
    for (const int64_t rows : {1, 2, 3, 5, 6, 7, 12, 13, 25}) this->check(rows, depth, 1 + (depth * 11 + rows) % 70);
  }
}

TYPED_TEST(TileGemmTest, LowRankTerm) {
  for (const int64_t rows : {1, 2, 5, 6, 7, 12, 13, 25}) {
    for (const int64_t rank : {1, 2, 7, 8, 33}) {
      for (const int64_t columns : {1, 15, 16, 33, 64, 70})
        this->check_low_rank(rows, (rows + columns) % 9, columns, rank);
    }
  }
}

TYPED_TEST(TileGemmTest, LowRankTermOfMoreThanOneBlock) {
  this->check_low_rank(13, 1025, 129, 600);
  this->check_low_rank(3, 1025, 129, 600);
  this->check_low_rank(13, 4099, 2081, 8);
}

TYPED_TEST(TileGemmTest, Empty) {
  this->check(0, 5, 3);
  this->check(5, 3, 0);
  this->check(0, 0, 0);
}

TYPED_TEST(TileGemmTest, FewRowsOfManyColumns) {
  for (int64_t rows = 1; rows <= 25; ++rows) {
    for (const int64_t columns : {127, 128, 129, 255, 256, 257, 289}) this->check(rows, 5, columns);
  }
}

// A wide row-major b is multiplied in ranges of columns, block by block of its rows.
TYPED_TEST(TileGemmTest, RangesOfColumns) {
  for (const int64_t rows : {12, 13, 24}) {
    for (const int64_t columns : {513, 1057, 2048}) this->check(rows, 131, columns);
  }
}

// Non-temporal stores write whole cache lines. The gap of 3 after a row makes rows of 61, 157 and 253 columns begin on
// one; others do not. The last columns fill no micro-tile.
TYPED_TEST(TileGemmTest, NonTemporalStores) {
  const auto multiply = [](const GemmOperand<TypeParam>& a, Product<TypeParam> product) {
    product.is_nontemporal = true;
    KernelGemm<TypeParam>().multiply(a, product);
  };
  for (const int64_t rows : {1, 13, 25}) {
    for (const int64_t depth : {0, 16, 1025}) {
      for (const int64_t columns : {61, 64, 157, 160, 253}) check_product<TypeParam>(multiply, rows, depth, columns);
    }
  }
}

TYPED_TEST(TileGemmTest, MoreThanOneBlock) {
  for (const int64_t rows : {7, 25}) {
    for (const int64_t depth : {511, 513, 1023, 1025}) this->check(rows, depth, 129);
  }
}

TYPED_TEST(TileGemmTest, MoreThanOneOuterBlock) {
  for (const int64_t rows : {13, 25}) this->check(rows, 4099, 2081);
  this->check(7, 8195, 33);
}

TYPED_TEST(TileGemmTest, SumsOverSeveralBlocksAreRoundedOnce) {
  for (const int64_t depth : {2047, 2048, 2049, 4097, 8193}) {
    for (const int64_t rows : {1, 7}) {
      const Operand<TypeParam> a(rows, depth, 4);
      const Operand<TypeParam> b(depth, 35, 5);
      const std::vector<double> product = exact_product(a.matrix(), b.matrix());
      Matrix<TypeParam> c(rows, 35);
      KernelGemm<TypeParam>().multiply(a.view(false), {b.view(false), c.view(), false});
      const auto want = [&](int64_t r, int64_t f) { return product[static_cast<size_t>(r * 35 + f)]; };
      expect_near(c, want, slack_of_sum<TypeParam>(depth));
    }
  }
}

// The bits of a row of c do not depend on the other rows, or on the layout of b.
TYPED_TEST(TileGemmTest, BitsOfARowDependOnNothingElse) {
  constexpr int64_t kRows = 29;
  const Operand<TypeParam> a(kRows, 2500, 6);
  const Operand<TypeParam> b(2500, 45, 7);
  Matrix<TypeParam> together(kRows, 45);
  KernelGemm<TypeParam>().multiply(a.view(false), {b.view(false), together.view(), false});
  for (const bool is_transposed : {false, true}) {
    for (int64_t height = 1; height <= 25; ++height) {
      Matrix<TypeParam> apart(kRows, 45);
      for (int64_t begin = 0; begin < kRows; begin += height) {
        const int64_t end = std::min(begin + height, kRows);
        KernelGemm<TypeParam>().multiply(a.view(is_transposed).row_range(begin, end),
                                         {b.view(is_transposed), apart.view().row_range(begin, end), false});
      }
      EXPECT_TRUE(apart.has_same_bits(together)) << height << " rows at a time";
    }
  }
}

// A product that reads rows by index has the same bits as the product of a copy of those rows.
TYPED_TEST(TileGemmTest, RowsOfAnIndex) {
  constexpr int64_t kDivisor = 3;
  for (const int64_t rows : {1, 5, 12, 40}) {
    for (const int64_t other : {3, 32, 77}) {
      const Operand<TypeParam> source(9, 35, 8);
      std::vector<int64_t> index;
      Matrix<TypeParam> copied(rows, 35);
      for (int64_t r = 0; r < rows; ++r) {
        index.push_back(r * 7 % (9 * kDivisor));
        for (int64_t c = 0; c < 35; ++c) copied.element(r, c) = source.view(false).row(index.back() / kDivisor)[c];
      }
      const GemmOperand<TypeParam> indexed(source.view(false), index.data(), kDivisor, rows);
      const GemmOperand<TypeParam> plain(copied.view().as_const());
      const auto product = [](const GemmOperand<TypeParam>& a, const GemmOperand<TypeParam>& b) {
        Matrix<TypeParam> c(a.rows(), b.columns());
        KernelGemm<TypeParam>().multiply(a, {b, c.view(), false});
        return c;
      };
      const Operand<TypeParam> right(35, other, 9);
      const Operand<TypeParam> left(other, rows, 10);
      EXPECT_TRUE(product(indexed, right.view(false)).has_same_bits(product(plain, right.view(false))));
      EXPECT_TRUE(product(indexed.transposed(), Operand<TypeParam>(rows, other, 11).view(false))
                      .has_same_bits(product(plain.transposed(), Operand<TypeParam>(rows, other, 11).view(false))));
      EXPECT_TRUE(product(left.view(false), indexed).has_same_bits(product(left.view(false), plain)));
    }
  }
}

// NaN beside a and b in memory must not reach c. 0 times infinity is NaN.
TYPED_TEST(TileGemmTest, NonFiniteValues) {
  Matrix<TypeParam> a(7, 3);
  Matrix<TypeParam> b(3, 5);
  a.fill(0.0);
  b.fill(1.0);
  b.element(1, 2) = narrow<TypeParam>(std::numeric_limits<Accumulator<TypeParam>>::infinity());
  Matrix<TypeParam> c(7, 5);
  KernelGemm<TypeParam>().multiply(a.view().as_const(), {b.view().as_const(), c.view(), false});
  for (int64_t r = 0; r < 7; ++r) {
    for (int64_t f = 0; f < 5; ++f) EXPECT_EQ(std::isnan(c(r, f)), f == 2);
  }
}

}  // namespace
}  // namespace maxmoe
