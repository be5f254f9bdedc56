// Tests of the product of bfloat16 pairs without its instruction (AVX512-BF16). CMakeLists.txt compiles tile_gemm.cpp
// once more, with pairs in plain arithmetic, so that packing and summing of pairs is tested on every processor.
#include "products.h"

MAXMOE_DECLARE_KERNEL(pairs, tile_gemm, TileGemm)

namespace maxmoe::pairs {
int64_t num_packed = 0;
}

namespace maxmoe {
namespace {

void check(int64_t rows, int64_t depth, int64_t columns) {
  const auto multiply = [](const GemmOperand<BFloat16>& a, const Product<BFloat16>& product) {
    pairs::tile_gemm(TileGemm<BFloat16>{a, &product, 1}, SerialExecutor());
  };
  check_product<BFloat16>(multiply, rows, depth, columns);
}

TEST(Pairs, EveryNumberOfRowsAndColumns) {
  for (int64_t rows = 1; rows <= 70; ++rows) {
    for (int64_t columns = 1; columns <= 70; ++columns) check(rows, (rows * 7 + columns * 3) % 9, columns);
  }
}

TEST(Pairs, EveryDepth) {
  for (int64_t depth = 0; depth <= 70; ++depth) {
    for (const int64_t rows : {1, 7, 13, 25}) check(rows, depth, 1 + (depth * 11 + rows) % 70);
  }
}

TEST(Pairs, MoreThanOneBlock) {
  check(200, 5, 9);
  check(7, 2049, 33);
  check(7, 600, 33);
}

// Number of elements that are packed for two products of the same rows.
int64_t packed_elements(int64_t rows, int64_t depth, int64_t columns, bool is_transposed) {
  const Operand<BFloat16> a(rows, depth, 1);
  const Operand<BFloat16> b(depth, columns, 2);
  Matrix<BFloat16> c(rows, columns);
  Matrix<BFloat16> second(rows, columns);
  const Product<BFloat16> products[] = {{b.view(is_transposed), c.view(), false},
                                        {b.view(is_transposed), second.view(), false}};
  pairs::num_packed = 0;
  pairs::tile_gemm(TileGemm<BFloat16>{a.view(is_transposed), products, 2}, SerialExecutor());
  return pairs::num_packed;
}

// Every element of a and b is packed once, for every number of rows above the few that need no packing.
TEST(Pairs, EveryElementIsPackedOnce) {
  for (const bool is_transposed : {false, true}) {
    // With 16 registers up to 24 rows read a row-major b in place, and up to 12 rows a transposed one.
    const int64_t few = is_transposed ? 13 : 25;
    for (const int64_t rows : {few, int64_t{100}, int64_t{500}}) {
      for (const int64_t depth : {5, 1024, 2500}) {
        EXPECT_EQ(packed_elements(rows, depth, 300, is_transposed), rows * depth + 2 * depth * 300);
      }
    }
    EXPECT_EQ(packed_elements(few, 4099, 2081, is_transposed), few * 4099 + 2 * 4099 * 2081);
  }
}

TEST(Pairs, FewRowsReadTheOtherSideInPlace) {
  const Operand<BFloat16> a(3, 100, 1);
  const Operand<BFloat16> b(100, 256, 2);
  Matrix<BFloat16> c(3, 256);
  for (const bool is_transposed : {false, true}) {
    const Product<BFloat16> product{b.view(is_transposed), c.view(), false};
    pairs::num_packed = 0;
    pairs::tile_gemm(TileGemm<BFloat16>{a.view(is_transposed), &product, 1}, SerialExecutor());
    EXPECT_EQ(pairs::num_packed, 0);
  }
}

}  // namespace
}  // namespace maxmoe
