// The rows of A of skinny_product.simd.h, in groups that one kernel multiplies at a time.
#pragma once

#include <utility>

#include "kernels/isa/vector.simd.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Maximum number of rows of A: the accumulators of MR rows leave registers for two vectors of B and one element of A.
constexpr int kMaxRowsOfGroup = kVectorRegisters == 32 ? 12 : 6;

// Number of VectorX2 that the kernel for `rows` rows computes at a time: a power of two, at most 4, whose accumulators
// fit into the registers. One row then has 8 independent accumulators, which cover the latency of multiply-adds.
constexpr int vectors_x2_of_rows(int rows) {
  int vectors_x2 = 4;
  while (vectors_x2 > 1 && rows * vectors_x2 > kMaxRowsOfGroup) vectors_x2 /= 2;
  return vectors_x2;
}

// Few rows of A, converted to the elements that a step multiplies. The elements of a step are neighbours, so that one
// pointer reaches all rows, and no two of them share a set of the first-level cache.
template <class Element, int kRows>
struct SkinnyRows {
  const Element* data;
  MAXMOE_INLINE Element operator()(int r, int64_t step) const { return data[step * kRows + r]; }
};

// Largest number of rows that are multiplied with any B in place; max_rows_in_place has exceptions. More than
// kMaxRowsOfGroup rows form several groups: each multiplies the same block of B, which the first group has loaded into
// a cache. With AVX-512 13 rows or more are faster with packed B (docs/concepts/kernels.md).
constexpr int64_t kMaxRowsInPlace = 12;

// A group of rows: the `index`th of `count`.
template <class Element>
struct RowGroup {
  const Element* steps;  // the elements of a step are neighbours, as in SkinnyRows
  Range rows;
  int64_t index;
  int64_t count;
};

// Rows of A, converted to the elements that a step multiplies, group by group.
template <class Element>
struct RowGroups {
  Element* data;
  int64_t num_rows;
  int64_t row_size;        // elements of each row in `data`
  int64_t max_group;       // rows
  int64_t first_step = 0;  // the first step that is multiplied

  MAXMOE_INLINE int64_t count() const { return (num_rows + max_group - 1) / max_group; }
  // Groups have about the same size.
  MAXMOE_INLINE Range rows(int64_t index) const {
    return {num_rows * index / count(), num_rows * (index + 1) / count()};
  }
  MAXMOE_INLINE Element* steps(Range group) const { return data + group.begin * row_size + first_step * group.size(); }
  MAXMOE_INLINE RowGroup<Element> operator[](int64_t index) const {
    return {steps(rows(index)), rows(index), index, count()};
  }
};

// Calls body<kRows>() for the number of rows of a group.
template <class Body, int... kIndex>
MAXMOE_INLINE void with_number_of_rows(int64_t rows, const Body& body, std::integer_sequence<int, kIndex...> /*all*/) {
  const auto call = [&]<int kRows> {
    body.template operator()<kRows>();
    return true;
  };
  static_cast<void>(((rows == kIndex + 1 && call.template operator()<kIndex + 1>()) || ...));
}

template <class Body>
MAXMOE_INLINE void with_number_of_rows(int64_t rows, const Body& body) {
  with_number_of_rows(rows, body, std::make_integer_sequence<int, kMaxRowsOfGroup>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
