// The product of bfloat16 pairs, on processors without the instruction for it: compiled once more with the pairs in
// plain arithmetic (CMakeLists.txt), so that how pairs are packed and summed is tested on every machine.
#include <gtest/gtest.h>

#include "kernels/tile_gemm.h"
#include "matrix.h"

MAXMOE_DECLARE_KERNEL(pairs, tile_gemm, TileGemm)

namespace maxmoe {
namespace {

void check(int64_t rows, int64_t depth, int64_t columns) {
  SCOPED_TRACE(testing::Message() << "[" << rows << ", " << depth << "] x [" << depth << ", " << columns << "]");
  // What lies beside a and b is NaN: the partner of a last element must be zero.
  const auto a = Matrix<BFloat16>::random(rows, depth, 1);
  const auto a_turned = Matrix<BFloat16>::random(depth, rows, 2);
  const auto b = Matrix<BFloat16>::random(depth, columns, 3);
  const auto b_turned = Matrix<BFloat16>::random(columns, depth, 4);
  const auto before = Matrix<BFloat16>::random(rows, columns, 5);
  for (int layout = 0; layout < 8; ++layout) {
    const bool accumulate = (layout & 4) != 0;
    const auto left = (layout & 1) != 0 ? a_turned.view().transposed() : a.view();
    const auto right = (layout & 2) != 0 ? b_turned.view().transposed() : b.view();
    Matrix<BFloat16> c = accumulate ? before : Matrix<BFloat16>(rows, columns);
    pairs::tile_gemm(TileGemm<BFloat16>{left, right, c.view(), accumulate}, SerialExecutor());
    const auto want = [&](int64_t r, int64_t f) {
      double sum = accumulate ? before(r, f) : 0.0;
      for (int64_t k = 0; k < depth; ++k) {
        const double factor = (layout & 1) != 0 ? a_turned(k, r) : a(r, k);
        sum += factor * ((layout & 2) != 0 ? b_turned(f, k) : b(k, f));
      }
      return sum;
    };
    expect_near(c, want, 2.0);
    EXPECT_TRUE(c.gap_is_intact());
  }
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

}  // namespace
}  // namespace maxmoe
