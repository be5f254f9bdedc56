// Packing of A and B: copies their blocks in the order in which a micro-kernel reads them, converted to the type in
// which it multiplies.
//
// A micro-panel holds the MR rows of A, or the NR columns of B, of a micro-tile, one step of the inner dimension after
// the other. A micro-kernel reads it with unit stride, for all strides of the operands. When operands were read in
// place, rows a power of two apart shared one set of the first-level cache, and the micro-kernel took 1.45 times as
// long (docs/concepts/kernels.md).
//
// If the rows of an operand in memory are contiguous across the inner dimension, they are copied row by row. If they
// are contiguous along it, they are transposed in square blocks in registers (pack_along_depth.simd.h).
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/product/gemm.h"
#include "kernels/product/tiled/micro_kernel.simd.h"
#include "kernels/product/tiled/pack_along_depth.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether micro-tiles write whole cache lines of c: rows begin on one, and so does every NR-th column.
template <class T>
bool begins_on_cache_lines(MatrixView<T> c) {
  const auto address = reinterpret_cast<uintptr_t>(c.data);
  return address % kCacheLineBytes == 0 && c.row_stride * int64_t{sizeof(T)} % kCacheLineBytes == 0;
}

// Prefetch distance in steps. The rows of B may be pages apart, where hardware prefetchers stop.
constexpr int64_t kPackPrefetchSteps = 8;

// Counts the elements that are packed, for tests.
#if MAXMOE_COUNT_PACKED
extern int64_t num_packed;
MAXMOE_INLINE void count_packed(int64_t elements) {
  num_packed += elements;
}
#else
MAXMOE_INLINE void count_packed(int64_t /*elements*/) {}
#endif

// Loads one step of a row-major B: NR elements of `row`. For pairs, each with the element below it in `next`, the next
// row; a null `next` counts as zeros.
template <class Element, class T>
MAXMOE_INLINE StepX2<Element> load_step(const T* row, const T* next) {
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    Vector<uint32_t> upper;
    Vector<uint32_t> lower{};
    std::memcpy(&upper, row, sizeof(upper));
    if (next != nullptr) std::memcpy(&lower, next, sizeof(lower));
    // Even columns first, then odd ones, as in VectorX2: a mask, a shift and an or per vector, without a permutation.
    return {(upper & 0xffffU) | lower << 16, upper >> 16 | (lower & 0xffff0000U)};
  } else {
    const VectorX2<Element> x2 = load_x2(row);
    return {x2.first, x2.second};
  }
}

// Loads the first kLanes elements of load_step in the order of memory. A needs that order, because its elements are
// broadcast one by one.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_half_step(const T* row, const T* next) {
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    HalfVector upper;
    HalfVector lower{};
    std::memcpy(&upper, row, sizeof(upper));
    if (next != nullptr) std::memcpy(&lower, next, sizeof(lower));
    return __builtin_convertvector(upper, Vector<uint32_t>) | __builtin_convertvector(lower, Vector<uint32_t>) << 16;
  } else {
    return load_vector(row);
  }
}

// Pointer to row d + 1 of the inner dimension, from `column` on, if a step has two rows and there is one; otherwise
// null.
template <class Element, class T>
MAXMOE_INLINE const T* second_row_of_step(const GemmOperand<T>& operand, int64_t d, Range depth, int64_t column) {
  return kDepthPerStep<Element> == 2 && d + 1 < depth.end ? operand.memory_row(d + 1) + column : nullptr;
}

// Packs one step of a transposed A, in which `count` rows of A are contiguous in memory. The first MR of them belong to
// the first micro-panel, the next MR to the second one, `panel_stride` elements after it, and so on.
template <class Element, class T>
MAXMOE_INLINE void pack_step_of_a(const T* row, const T* next, int64_t count, Element* target, int64_t panel_stride) {
  constexpr int kChunks = (kMR + kLanes<Element> - 1) / kLanes<Element>;
  constexpr int64_t kRead = kChunks * kLanes<Element>;  // at least MR
  const auto pack_panel = [](const T* elements, const T* below, Element* of_step) {
#pragma GCC unroll 3
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int first = chunk * kLanes<Element>;
      store_vector(of_step + first,
                   load_half_step<Element>(elements + first, below == nullptr ? nullptr : below + first));
    }
  };
  int64_t r = 0;
  // Whole vectors are read. Where they would end past the row, a padded copy is read instead.
  for (; r + kRead <= count; r += kMR, target += panel_stride) {
    pack_panel(row + r, next == nullptr ? nullptr : next + r, target);
  }
  for (; r < count; r += kMR, target += panel_stride) {
    T part[2][kRead];
    std::memset(static_cast<void*>(part), 0, sizeof(part));
    copy_row(row + r, part[0], at_most(kMR, count - r));
    if (next != nullptr) copy_row(next + r, part[1], at_most(kMR, count - r));
    pack_panel(part[0], part[1], target);
  }
}

// Number of elements of a micro-panel of A, one vector more than its steps have: whole vectors are stored, and the last
// one ends past the last step. The panels of a transposed A are packed at the same time. At a distance of a multiple of
// 4 KiB they would share one set of the first-level cache, which reduced packing to 0.45 of its speed
// (docs/concepts/kernels.md).
template <class Element>
MAXMOE_INLINE int64_t panel_size_of_a(int64_t num_steps) {
  const int64_t size = num_steps * kMR + kLanes<Element>;
  return size * int64_t{sizeof(Element)} % 4096 == 0 ? size + kLanes<Element> : size;
}

// Packs rows of A into micro-panels. Elements past the last row are never multiplied: the last panel is read by a
// micro-kernel of fewer rows.
template <class Element, class T>
void pack_a(const GemmOperand<T>& a, Range depth, Element* panels) {
  count_packed(a.rows() * depth.size());
  const int64_t num_steps = steps_of_depth<Element>(depth.size());
  if (!a.is_transposed) {
    for (int64_t row = 0; row < a.rows(); row += kMR) {
      const Range rows = range_from(row, kMR, a.rows());
      pack_along_depth<Element, kMR>(
          a, rows, depth, [](int i) { return i; }, panels + row / kMR * panel_size_of_a<Element>(num_steps));
    }
    return;
  }
  // Steps are the outer loop, so that A is read in the order of memory.
  for (int64_t k = 0; k < num_steps; ++k) {
    const int64_t d = depth.begin + k * kDepthPerStep<Element>;
    const T* next = second_row_of_step<Element>(a, d, depth, 0);
    pack_step_of_a(a.memory_row(d), next, a.rows(), panels + k * kMR, panel_size_of_a<Element>(num_steps));
  }
}

// load_step for at most NR columns. The columns past them are zeros.
template <class Element, class T>
MAXMOE_INLINE StepX2<Element> load_step(const T* row, const T* next, int64_t columns) {
  constexpr int kWidth = kNR<Accumulator<T>>;
  if (columns >= kWidth) return load_step<Element>(row, next);
  T part[2][kWidth];
  std::memset(static_cast<void*>(part), 0, sizeof(part));
  copy_row(row, part[0], columns);
  if (next != nullptr) copy_row(next, part[1], columns);
  return load_step<Element>(part[0], part[1]);
}

// Packs columns of B into micro-panels of NR columns, one panel after the other. The last one is padded with columns of
// zeros, so that a micro-kernel always has NR columns.
template <class Element, class T>
void pack_b(const GemmOperand<T>& b, Range depth, Range columns, Element* panels) {
  constexpr int kWidth = kNR<Accumulator<T>>;
  count_packed(depth.size() * columns.size());
  const int64_t panel_size = steps_of_depth<Element>(depth.size()) * kWidth;
  if (b.is_transposed) {
    constexpr auto kColumnOf = [](int i) { return column_of_lane<T>(i / kLanes<Element>, i % kLanes<Element>); };
    for (int64_t column = columns.begin; column < columns.end; column += kWidth, panels += panel_size) {
      pack_along_depth<Element, kWidth>(b, {column, columns.end}, depth, kColumnOf, panels);
    }
    return;
  }
  // Row by row across all panels, so that B is read in the order of memory.
  for (int64_t d = depth.begin; d < depth.end; d += kDepthPerStep<Element>, panels += kWidth) {
    const int64_t prefetched = d + kPackPrefetchSteps * kDepthPerStep<Element>;
    for (int64_t ahead = prefetched; ahead < at_most(prefetched + kDepthPerStep<Element>, depth.end); ++ahead) {
      prefetch_row(b.memory_row(ahead) + columns.begin, columns.size());
    }
    const T* row = b.memory_row(d) + columns.begin;
    const T* next = second_row_of_step<Element>(b, d, depth, columns.begin);
    Element* target = panels;
    for (int64_t column = 0; column < columns.size(); column += kWidth, target += panel_size) {
      const auto step =
          load_step<Element>(row + column, next == nullptr ? nullptr : next + column, columns.size() - column);
      store_vector(target, step.first);
      store_vector(target + kLanes<Element>, step.second);
    }
  }
}

// The micro-kernel for the first MR rows of A. It packs the NR columns of a row-major B from `column` on while it
// multiplies with them, so that the loads and stores of packing run in parallel with the multiply-adds.
template <class Out, class Element, class T>
void micro_kernel_packing_b(const MicroTile<Out, Element>& tile, const GemmOperand<T>& b, Range depth, int64_t column,
                            Element* panel) {
  constexpr int kWidth = kNR<Accumulator<T>>;
  count_packed(depth.size() * kWidth);
  multiply_micro_tile<kMR>(tile, [&](int64_t k) {
    const int64_t d = depth.begin + k * kDepthPerStep<Element>;
    const StepX2<Element> step =
        load_step<Element>(b.memory_row(d) + column, second_row_of_step<Element>(b, d, depth, column));
    store_vector(panel + k * kWidth, step.first);
    store_vector(panel + k * kWidth + kLanes<Element>, step.second);
    return step;
  });
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
