// Tests of dequantize: out[r, c] = (lookup(code) - zero) * scale, one product in float, rounded once.
#include "kernels/quantized/dequantize.h"

#include <gtest/gtest.h>

#include <set>

#include "quantized.h"

namespace maxmoe {
namespace {

template <class T>
class DequantizeTest : public testing::Test {
 protected:
  // The result for `count` matrices, one below the other, without gaps.
  static std::vector<T> run(const QuantizedStack& stack, const Executor& executor) {
    const auto size = static_cast<size_t>(stack.count * stack.first.rows * stack.first.columns);
    std::vector<T> out(size + 1);  // the last one is a guard
    std::memset(static_cast<void*>(out.data()), 0xFF, out.size() * sizeof(T));
    dequantize(Dequantize<T>{stack, out.data()}, executor);
    const T guard = out.back();
    out.pop_back();
    T untouched;
    std::memset(static_cast<void*>(&untouched), 0xFF, sizeof(T));
    EXPECT_EQ(std::memcmp(&guard, &untouched, sizeof(T)), 0) << "written past the last element";
    return out;
  }

  static void check(const QuantizedFormat& format, int64_t rows, int64_t columns, Scales scales) {
    SCOPED_TRACE(testing::Message() << text(format) << ", [" << rows << ", " << columns << "]");
    const QuantizedTestMatrix matrix(format, rows, columns, scales, 1, true);
    QuantizedStack stack;
    stack.first = matrix.view();
    stack.count = 1;
    const std::vector<T> out = run(stack, SerialExecutor());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const T want = narrow<T>(static_cast<Accumulator<T>>(matrix.element(r, c)));
        const T got = out[static_cast<size_t>(r * columns + c)];
        if (is_same_number(got, want)) continue;
        FAIL() << static_cast<double>(widen(got)) << " instead of " << matrix.element(r, c) << " at row " << r
               << ", column " << c;
      }
    }
    const std::vector<T> threaded = run(stack, ThreadExecutor(4));
    EXPECT_TRUE(out.empty() || std::memcmp(out.data(), threaded.data(), out.size() * sizeof(T)) == 0);
  }
};
TYPED_TEST_SUITE(DequantizeTest, Dtypes, DtypeNames);

// With 40 rows of 257 columns, random bytes hold all codes.
TYPED_TEST(DequantizeTest, AllCodes) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    const QuantizedTestMatrix matrix(format, 40, 257, Scales::moderate, 1, true);
    std::set<int> codes;
    for (int64_t r = 0; r < 40; ++r) {
      for (int64_t c = 0; c < 257; ++c) codes.insert(matrix.code(r, c));
    }
    EXPECT_EQ(codes.size(), size_t{1} << format.codes->bits);
    this->check(format, 40, 257, Scales::moderate);
    this->check(format, 40, 257, Scales::any);
  }
}

TYPED_TEST(DequantizeTest, RaggedColumns) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    for (int64_t columns = 0; columns <= 70; ++columns) this->check(format, 3, columns, Scales::moderate);
  }
}

TYPED_TEST(DequantizeTest, ManyTasks) {
  for (const QuantizedFormat& format : kQuantizedFormats) this->check(format, 300, 300, Scales::moderate);
}

// Matrices of a stack, with memory of others between them.
TYPED_TEST(DequantizeTest, Stack) {
  for (const QuantizedFormat& format : {kQuantizedFormats[4], QuantizedFormat{&Nvfp4::kCodes, ScaleType::e4m3, 0, 4}}) {
    const QuantizedTestMatrix all(format, 60, 130, Scales::moderate, 2);
    QuantizedStack stack;
    stack.first = all.view();
    stack.first.rows = 10;
    stack.count = 3;
    stack.stride = 20 * stack.first.row_bytes;
    stack.scales_stride = 20 * stack.first.scales_per_row;
    stack.row_scales_stride = 20;
    const auto out = this->run(stack, SerialExecutor());
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t r = 0; r < 10; ++r) {
        for (int64_t c = 0; c < 130; ++c) {
          const auto want = narrow<TypeParam>(static_cast<Accumulator<TypeParam>>(all.element(20 * i + r, c)));
          ASSERT_TRUE(is_same_number(out[static_cast<size_t>((i * 10 + r) * 130 + c)], want))
              << text(format) << " " << i << " " << r << " " << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace maxmoe
