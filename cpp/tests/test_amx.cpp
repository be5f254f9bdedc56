// Tests of the product on tiles, in the emulation on every processor, and on the tiles of this one if it has them.
//
// The expected bits are computed one by one: chains of fused multiply-adds over the even and the odd steps of each
// block of 32, which are added to each other and then to the sum.
#include <signal.h>
#include <sys/time.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels/isa/emulated_tiles.h"
#include "kernels/product/amx/amx_product.h"
#include "products.h"

namespace maxmoe {
namespace {

using Multiply = void (*)(const TileGemm<BFloat16>&);

// The variants that this processor runs.
std::vector<Multiply> variants() {
  std::vector<Multiply> result{amx_emulated::multiply_with_tiles};
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_amx)
  if (is_supported(Isa::amx)) result.push_back(amx::multiply_with_tiles);
#endif
  return result;
}

float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value;
}

// One element of a product that begins with `sum`.
float element(float sum, const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t block = 0; block < a.size(); block += 32) {
    float chains[2] = {0, 0};
    for (size_t k = block; k < std::min(block + 32, a.size()); ++k) {
      chains[k % 2] = flushed(std::fma(flushed(a[k]), flushed(b[k]), chains[k % 2]));
    }
    sum = flushed(flushed(sum) + flushed(chains[0] + chains[1]));
  }
  return sum;
}

// Numbers with exponents in a range that grows with `spread`.
Matrix<BFloat16> with_exponents(int64_t rows, int64_t columns, unsigned seed, int spread, int middle = 0) {
  Matrix<BFloat16> matrix(rows, columns);
  Random random(seed);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const double exponent = middle + (spread == 0 ? 0.0 : std::floor(random.uniform(-spread, spread)));
      matrix.element(r, c) = narrow<BFloat16>(static_cast<float>(std::ldexp(random.uniform(-1, 1), int(exponent))));
    }
  }
  return matrix;
}

template <class At>
std::vector<float> numbers(int64_t count, const At& at) {
  std::vector<float> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<float>(at(i)));
  return result;
}

Matrix<BFloat16> transposed(const Matrix<BFloat16>& matrix) {
  Matrix<BFloat16> result(matrix.columns(), matrix.rows());
  for (int64_t r = 0; r < matrix.rows(); ++r) {
    for (int64_t c = 0; c < matrix.columns(); ++c) result.element(c, r) = narrow<BFloat16>(float(matrix(r, c)));
  }
  return result;
}

// Compares the bits of c = a * b, or c += a * b, with every layout.
void check_bits(const Matrix<BFloat16>& a, const Matrix<BFloat16>& b, bool accumulate) {
  SCOPED_TRACE(testing::Message() << a.rows() << " x " << a.columns() << " x " << b.columns() << ", accumulate "
                                  << accumulate);
  const auto before = Matrix<BFloat16>::random(a.rows(), b.columns(), 9);
  Matrix<BFloat16> expected(a.rows(), b.columns());
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t f = 0; f < b.columns(); ++f) {
      const auto row = numbers(a.columns(), [&](int64_t d) { return a(r, d); });
      const auto column = numbers(a.columns(), [&](int64_t d) { return b(d, f); });
      expected.element(r, f) = narrow<BFloat16>(element(accumulate ? float(before(r, f)) : 0.0F, row, column));
    }
  }
  const Matrix<BFloat16> a_transposed = transposed(a);
  const Matrix<BFloat16> b_transposed = transposed(b);
  for (const Multiply multiply : variants()) {
    for (int layout = 0; layout < 4; ++layout) {
      Matrix<BFloat16> c = accumulate ? before : Matrix<BFloat16>(a.rows(), b.columns());
      const Product<BFloat16> product{(layout & 1) != 0 ? b_transposed.view().transposed() : b.view(), c.view(),
                                      accumulate};
      multiply({(layout & 2) != 0 ? a_transposed.view().transposed() : a.view(), &product, 1});
      EXPECT_TRUE(c.has_same_bits(expected)) << "layout " << layout;
      EXPECT_TRUE(c.gap_is_intact());
    }
  }
}

// Rows around the few that are multiplied by vectors, and around one, two and three tiles.
TEST(Amx, BitsOfEveryTail) {
  for (const int64_t rows : {1, 5, 6, 7, 15, 16, 17, 31, 32, 33, 47, 65}) {
    for (const int64_t depth : {1, 2, 31, 32, 33, 65}) {
      for (const int64_t columns : {1, 31, 32, 33, 64}) {
        check_bits(Matrix<BFloat16>::random(rows, depth, 1), Matrix<BFloat16>::random(depth, columns, 2),
                   (rows + depth + columns) % 2 == 0);
      }
    }
  }
}

TEST(Amx, BitsOfSeveralBlocks) {
  for (const int64_t rows : {3, 20, 70}) {
    check_bits(Matrix<BFloat16>::random(rows, 1100, 1), Matrix<BFloat16>::random(1100, 161, 2), rows == 20);
  }
  check_bits(Matrix<BFloat16>::random(20, 70, 1), Matrix<BFloat16>::random(70, 1090, 2), false);
}

// Subnormal inputs, products and sums are zeros, and sums that cancel keep their last bits.
TEST(Amx, BitsOfEveryExponent) {
  for (const int64_t rows : {4, 18}) {
    for (const int spread : {8, 30, 60}) {
      check_bits(with_exponents(rows, 70, 3, spread), with_exponents(70, 40, 4, spread), false);
    }
    check_bits(with_exponents(rows, 70, 5, 10, -60), with_exponents(70, 40, 6, 10, -62), false);
    check_bits(with_exponents(rows, 70, 5, 6, -124), with_exponents(70, 40, 6, 6, 2), false);
    check_bits(with_exponents(rows, 70, 5, 4, 62), with_exponents(70, 40, 6, 4, 62), false);
  }
}

// A product of the same shape before must leave nothing behind.
TEST(Amx, NotANumberStaysInItsRowAndColumn) {
  for (const int64_t rows : {4, 18, 40}) {
    const auto finite_a = Matrix<BFloat16>::random(rows, 45, 1);
    const auto finite_b = Matrix<BFloat16>::random(45, 40, 2);
    auto a = finite_a;
    auto b = finite_b;
    a.element(rows / 2, 44) = narrow<BFloat16>(std::numeric_limits<float>::quiet_NaN());
    b.element(3, 7) = narrow<BFloat16>(std::numeric_limits<float>::infinity());
    for (const Multiply multiply : variants()) {
      Matrix<BFloat16> c(rows, 40);
      const Product<BFloat16> product{b.view().as_const(), c.view(), false};
      multiply({a.view().as_const(), &product, 1});
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t f = 0; f < 40; ++f) {
          EXPECT_EQ(std::isnan(c(r, f)), r == rows / 2);
          EXPECT_EQ(std::isfinite(c(r, f)), r != rows / 2 && f != 7);
        }
      }
      Matrix<BFloat16> after(rows, 40);
      Matrix<BFloat16> expected(rows, 40);
      const Product<BFloat16> second{finite_b.view(), after.view(), false};
      multiply({finite_a.view(), &second, 1});
      const Product<BFloat16> alone{finite_b.view(), expected.view(), false};
      amx_emulated::multiply_with_tiles({finite_a.view(), &alone, 1});
      EXPECT_TRUE(after.has_same_bits(expected));
    }
  }
}

// Several products of the same rows: each has the bits that it has alone, also where one reads the result of another.
TEST(Amx, ProductsOfTheSameRows) {
  for (const int64_t rows : {5, 16, 33}) {
    const auto a = Matrix<BFloat16>::random(rows, 70, 1);
    const auto factor = Matrix<BFloat16>::random(70, 8, 2);
    const auto b = Matrix<BFloat16>::random(70, 50, 3);
    const auto expand = Matrix<BFloat16>::random(8, 50, 4);
    for (const Multiply multiply : variants()) {
      Matrix<BFloat16> reduced(rows, 8);
      Matrix<BFloat16> together(rows, 50);
      Product<BFloat16> products[] = {{factor.view(), reduced.view(), false}, {b.view(), together.view(), false}};
      products[1].reduced = reduced.view().as_const();
      products[1].expand = expand.view();
      multiply({a.view(), products, 2});
      Matrix<BFloat16> alone(rows, 50);
      products[1].c = alone.view();
      multiply({a.view(), products + 1, 1});
      EXPECT_TRUE(together.has_same_bits(alone));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t f = 0; f < 50; ++f) {
          const auto row = numbers(70, [&](int64_t d) { return a(r, d); });
          const auto column = numbers(70, [&](int64_t d) { return b(d, f); });
          const auto of_reduced = numbers(8, [&](int64_t d) { return reduced(r, d); });
          const auto of_expand = numbers(8, [&](int64_t d) { return expand(d, f); });
          EXPECT_EQ(together(r, f), widen(narrow<BFloat16>(element(element(0, row, column), of_reduced, of_expand))));
        }
      }
    }
  }
}

// The tiles of this thread are free after a product: oneDNN may configure them, and a switch of threads or a signal
// saves none.
TEST(Amx, TilesAreReleased) {
  const auto a = Matrix<BFloat16>::random(18, 64, 1);
  const auto b = Matrix<BFloat16>::random(64, 32, 2);
  Matrix<BFloat16> c(18, 32);
  const Product<BFloat16> product{b.view(), c.view(), false};
  for (const Multiply multiply : variants()) multiply({a.view(), &product, 1});
  EXPECT_THROW(emulated_tiles::zero(0), std::logic_error);
#if defined(__x86_64__)
  if (!is_supported(Isa::amx)) return;
  // The components of the thread's state in use: 17 is the configuration of tiles, 18 their numbers.
  uint32_t in_use = 0;
  asm volatile("xgetbv" : "=a"(in_use) : "c"(1) : "edx");
  EXPECT_EQ(in_use >> 17 & 3, 0);
#endif
}

volatile sig_atomic_t is_multiplying = 0;
volatile sig_atomic_t num_interruptions = 0;

// Overwrites the registers that products use.
void overwrite_registers(int /*signal*/) {
  num_interruptions = num_interruptions + is_multiplying;
  volatile float sum = 1;
  for (int i = 0; i < 64; ++i) sum = sum * 1.5F + static_cast<float>(i);
#if defined(__x86_64__)
  if (!is_supported(Isa::avx512bf16)) return;
  asm volatile(
      ".irp register,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
      "vpternlogd $0xff, %%zmm\\register, %%zmm\\register, %%zmm\\register\n"
      ".endr" ::
          : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
            "xmm13", "xmm14", "xmm15");
#endif
}

// Signals interrupt products every 200 us.
TEST(Amx, SignalsChangeNoBit) {
  const auto a = Matrix<BFloat16>::random(40, 512, 1);
  const auto b = Matrix<BFloat16>::random(512, 96, 2);
  Matrix<BFloat16> expected(40, 96);
  const Product<BFloat16> alone{b.view(), expected.view(), false};
  amx_emulated::multiply_with_tiles({a.view(), &alone, 1});
  struct sigaction action{};
  struct sigaction action_before{};
  action.sa_handler = overwrite_registers;
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(sigaction(SIGALRM, &action, &action_before), 0);
  const auto interrupt_every = [](suseconds_t microseconds) {
    const itimerval interval{{0, microseconds}, {0, microseconds}};
    ASSERT_EQ(setitimer(ITIMER_REAL, &interval, nullptr), 0);
  };
  interrupt_every(200);
  for (const Multiply multiply : variants()) {
    num_interruptions = 0;
    bool is_equal = true;
    for (int i = 0; i < 100000 && is_equal && num_interruptions < 100; ++i) {
      Matrix<BFloat16> c(40, 96);
      const Product<BFloat16> product{b.view(), c.view(), false};
      is_multiplying = 1;
      multiply({a.view(), &product, 1});
      is_multiplying = 0;
      is_equal = c.has_same_bits(expected);
    }
    EXPECT_TRUE(is_equal) << "after " << num_interruptions << " interruptions";
    EXPECT_GE(num_interruptions, 100);
  }
  interrupt_every(0);
  sigaction(SIGALRM, &action_before, nullptr);
}

TEST(Amx, WrongUseOfTilesIsAnError) {
  EXPECT_THROW(emulated_tiles::zero(0), std::logic_error);
  alignas(64) uint8_t configuration[64] = {1};
  const auto set = [&](int tile, uint8_t rows, uint8_t row_bytes) {
    configuration[16 + 2 * tile] = row_bytes;
    configuration[48 + tile] = rows;
  };
  set(0, 4, 64);
  set(1, 4, 64);
  set(2, 16, 64);
  set(3, 3, 64);
  emulated_tiles::configure(configuration);
  EXPECT_NO_THROW(emulated_tiles::multiply(0, 1, 2));
  EXPECT_THROW(emulated_tiles::multiply(0, 3, 2), std::logic_error);
  emulated_tiles::release();
  EXPECT_THROW(emulated_tiles::multiply(0, 1, 2), std::logic_error);
  set(0, 17, 64);
  EXPECT_THROW(emulated_tiles::configure(configuration), std::logic_error);
}

}  // namespace
}  // namespace maxmoe
