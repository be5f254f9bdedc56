// Matrices that own their memory, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "executors.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"
#include "random.h"

namespace maxmoe {

// Aligns memory to a cache line, like the memory of tensors.
template <class T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kCacheLine{64};

  CacheLineAllocator() = default;
  template <class U>
  explicit CacheLineAllocator(const CacheLineAllocator<U>& /*other*/) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kCacheLine)); }
  void deallocate(T* memory, size_t /*count*/) { ::operator delete(memory, kCacheLine); }
  bool operator==(const CacheLineAllocator&) const = default;
};

// A row-major matrix with a gap after each row. All bytes are initially 0xFF, which is a NaN in every type: a kernel
// that reads elements that were never written returns NaN, and a kernel that writes past a row changes the gap.
template <class T>
class Matrix {
 public:
  static constexpr int64_t kGap = 3;  // rows begin anywhere in a vector

  Matrix(int64_t rows, int64_t columns, int64_t gap = kGap)
      : rows_(rows), columns_(columns), gap_(gap), values_(rows * (columns + gap)) {
    poison(0, rows);
  }

  // Copies a matrix of another type to a wider type.
  template <class S>
  explicit Matrix(const Matrix<S>& other) : Matrix(other.rows(), other.columns()) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) element(r, c) = static_cast<T>(other(r, c));
    }
  }

  static Matrix random(int64_t rows, int64_t columns, unsigned seed, int64_t gap = kGap) {
    Matrix matrix(rows, columns, gap);
    matrix.randomize(seed);
    return matrix;
  }

  // Fills the matrix with uniform random numbers in [-bound, bound).
  void randomize(unsigned seed, double bound = 1.0) {
    Random random(seed);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) {
        element(r, c) = narrow<T>(static_cast<Accumulator<T>>(random.uniform(-bound, bound)));
      }
    }
  }

  void fill(double value) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) element(r, c) = narrow<T>(static_cast<Accumulator<T>>(value));
    }
  }

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  T& element(int64_t r, int64_t c) { return values_[static_cast<size_t>(r * (columns_ + gap_) + c)]; }
  double operator()(int64_t r, int64_t c) const {
    return widen(values_[static_cast<size_t>(r * (columns_ + gap_) + c)]);
  }
  MatrixView<T> view() { return {values_.data(), rows_, columns_, columns_ + gap_}; }
  ConstMatrixView<T> view() const { return {values_.data(), rows_, columns_, columns_ + gap_}; }

  // A copy of the matrix with NaN in rows [begin, end).
  Matrix poisoned(int64_t begin, int64_t end) const {
    Matrix copy = *this;
    copy.poison(begin, end);
    return copy;
  }
  bool gap_is_intact() const {
    const std::vector<unsigned char> untouched(static_cast<size_t>(gap_) * sizeof(T), 0xFF);
    for (int64_t r = 0; r < rows_; ++r) {
      const T* gap = values_.data() + r * (columns_ + gap_) + columns_;
      if (std::memcmp(gap, untouched.data(), untouched.size()) != 0) return false;
    }
    return true;
  }
  bool has_same_bits(const Matrix& other) const {
    return values_.empty() || std::memcmp(values_.data(), other.values_.data(), values_.size() * sizeof(T)) == 0;
  }

 private:
  void poison(int64_t begin, int64_t end) {
    const auto row_bytes = (columns_ + gap_) * static_cast<int64_t>(sizeof(T));
    std::fill_n(reinterpret_cast<unsigned char*>(values_.data()) + begin * row_bytes, (end - begin) * row_bytes, 0xFF);
  }

  int64_t rows_;
  int64_t columns_;
  int64_t gap_;
  std::vector<T, CacheLineAllocator<T>> values_;
};

// Stack of `count` matrices of one shape, stored one below the other.
template <class T>
MatrixStack<T> stack(Matrix<T>& matrix, int64_t count) {
  return {matrix.view().row_range(0, count == 0 ? 0 : matrix.rows() / count), count,
          count == 0 ? 0 : matrix.rows() / count * matrix.view().row_stride};
}
template <class T>
ConstMatrixStack<T> stack(const Matrix<T>& matrix, int64_t count) {
  return {matrix.view().row_range(0, count == 0 ? 0 : matrix.rows() / count), count,
          count == 0 ? 0 : matrix.rows() / count * matrix.view().row_stride};
}

// Error bound of a sum of a few dozen terms of size 1 that is rounded once to T.
template <class T>
constexpr double tolerance() {
  if (std::is_same_v<T, double>) return 1e-13;
  if (std::is_same_v<T, float>) return 2e-5;
  return std::is_same_v<T, BFloat16> ? 0x1p-8 : 0x1p-10;
}

template <class T, class Want>
void expect_near(const Matrix<T>& got, const Want& want, double slack = 1.0) {
  for (int64_t r = 0; r < got.rows(); ++r) {
    for (int64_t c = 0; c < got.columns(); ++c) {
      const double expected = want(r, c);
      const double allowed = slack * tolerance<T>() * std::max(1.0, std::abs(expected));
      if (std::abs(got(r, c) - expected) <= allowed) continue;  // the macro takes ten times as long
      ASSERT_NEAR(got(r, c), expected, allowed) << "at row " << r << ", column " << c;
    }
  }
}

// Returns the matrix that kernel(out, executor) writes. Checks that one thread and several threads give the same bits.
template <class T, class Kernel>
Matrix<T> run_kernel(int64_t rows, int64_t columns, const Kernel& kernel) {
  Matrix<T> out(rows, columns);
  kernel(out.view(), SerialExecutor());
  EXPECT_TRUE(out.gap_is_intact());
  Matrix<T> threaded(rows, columns);
  kernel(threaded.view(), ThreadExecutor(4));
  EXPECT_TRUE(threaded.has_same_bits(out)) << "the result depends on the number of threads";
  return out;
}

using Dtypes = testing::Types<double, float, BFloat16, Float16>;

struct DtypeNames {
  template <class T>
  static std::string GetName(int) {
    return dtype_name<T>();
  }
};

}  // namespace maxmoe
