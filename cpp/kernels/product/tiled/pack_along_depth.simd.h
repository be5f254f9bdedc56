// Packing of rows that are contiguous along the inner dimension: they are transposed in square blocks in registers.
#pragma once

#include "kernels/isa/transpose.simd.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/product/gemm.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Number of elements of the inner dimension in a step. A step multiplies an Element: an Accumulator<T>, or a
// BFloat16Pair, which holds two elements of the inner dimension.
template <class Element>
constexpr int64_t kDepthPerStep = std::is_same_v<Element, BFloat16Pair> ? 2 : 1;
// The last step of pairs has one element if the depth is odd. The other one is zero in A and in B.
template <class Element>
constexpr int64_t steps_of_depth(int64_t depth) {
  return (depth + kDepthPerStep<Element> - 1) / kDepthPerStep<Element>;
}

// Loads kLanes steps that are contiguous along the inner dimension.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_along_depth(const T* source) {
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    Vector<Element> pairs;
    std::memcpy(&pairs, source, sizeof(pairs));
    return pairs;
  } else {
    return load_vector(source);
  }
}

// The same if `depth` elements are left: those past them are zeros.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_along_depth(const T* source, int64_t depth) {
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<Element>;
  if (depth >= kDepth) return load_along_depth<Element>(source);
  // Reading a whole vector past the end of a row could read past the end of the allocation.
  T part[kDepth];
  std::memset(static_cast<void*>(part), 0, sizeof(part));
  copy_row(source, static_cast<T*>(part), depth);
  return load_along_depth<Element>(static_cast<const T*>(part));
}

// The element type of a block of a matrix that is contiguous along the inner dimension: for bfloat16 a pair, even where
// pairs are multiplied as floats, because the same shuffles then transpose twice the elements.
template <class T, class Element>
using BlockElement = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Pair, Element>;

// Number of steps of Elements in a step of a block.
template <class T, class Element>
constexpr int64_t kStepsPerBlockStep = kDepthPerStep<BlockElement<T, Element>> / kDepthPerStep<Element>;

// Calls body(index, values) for each step of Elements in a step of a block: one, or the two floats of pairs, the second
// one only if `has_second`. `first` is the index of the first one.
template <class Element, class V, class Body>
MAXMOE_INLINE void for_steps_of_elements(int64_t first, bool has_second, const V& step, const Body& body) {
  if constexpr (std::is_same_v<V, Vector<Element>>) {
    body(first, step);
  } else {
    body(first, std::bit_cast<Vector<Element>>(step << 16));
    if (has_second) body(first + 1, std::bit_cast<Vector<Element>>(step & 0xffff0000U));
  }
}

// Transposes a square block: kLanes rows that are contiguous along the inner dimension, from `done` on. Step i is
// stored at target + i * width. The loops are unrolled, as 16 is the largest number of lanes: `block` stays in
// registers only if all of its indices are constants.
template <class Element, class T>
MAXMOE_INLINE void pack_block_along_depth(const T* const* rows, int64_t done, Element* target, int64_t width) {
  using Of = BlockElement<T, Element>;
  Vector<Of> block[kLanes<Of>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<Of>; ++i) block[i] = load_along_depth<Of>(rows[i] + done);
  transpose_square<Of>(block);
#pragma GCC unroll 16
  for (int step = 0; step < kLanes<Of>; ++step) {
    for_steps_of_elements<Element>(step * kStepsPerBlockStep<T, Element>, true, block[step],
                                   [&](int64_t k, auto values)
                                       MAXMOE_INLINE_LAMBDA { store_vector<Element>(target + k * width, values); });
  }
}

// The same for the last block of an inner dimension, of which `depth` elements are left. It is padded with zeros: to
// read whole vectors could read past the end of the allocation.
template <class Element, class T>
void pack_last_block_along_depth(const T* const* rows, int64_t done, int64_t depth, Element* target, int64_t width) {
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<BlockElement<T, Element>>;
  T padded[kLanes<Element>][kDepth];
  std::memset(static_cast<void*>(padded), 0, sizeof(padded));
  const T* padded_rows[kLanes<Element>];
  for (int i = 0; i < kLanes<Element>; ++i) {
    copy_row(rows[i] + done, static_cast<T*>(padded[i]), depth);
    padded_rows[i] = padded[i];
  }
  Element steps[kDepth / kDepthPerStep<Element>][kLanes<Element>];
  pack_block_along_depth<Element, T>(padded_rows, 0, steps[0], kLanes<Element>);
  for (int64_t step = 0; step < steps_of_depth<Element>(depth); ++step) {
    store_vector(target + step * width, load_vector<Element>(steps[step]));
  }
}

// Packs rows of `memory` that are contiguous along the inner dimension into a micro-panel with `kWidth` elements per
// step: element i of a step is from row `row_of(i)` of the range. Rows past its end repeat the last one: the results
// that they give are not read.
//
// Whole vectors are stored. The elements past kWidth are overwritten by the next step, and by the chunk of lanes
// before: hence the order of the chunks. All blocks of a cache line are packed before another chunk is: rows a power of
// two apart share a set of the first-level cache, which does not hold two chunks.
template <class Element, int kWidth, class T, class RowOf>
MAXMOE_INLINE void pack_along_depth(const GemmOperand<T>& memory, Range rows, Range depth, const RowOf& row_of,
                                    Element* target) {
  constexpr int kLanesOfChunk = kLanes<Element>;
  constexpr int kChunks = (kWidth + kLanesOfChunk - 1) / kLanesOfChunk;
  constexpr int64_t kDepthOfBlock = kLanesOfChunk * kDepthPerStep<BlockElement<T, Element>>;
  constexpr int64_t kDepthOfLine = kCacheLineBytes / kVectorBytes * kDepthOfBlock;
  const T* source[kChunks * kLanesOfChunk];
  for (int i = 0; i < kChunks * kLanesOfChunk; ++i) {
    const int64_t row = rows.begin + (i < kWidth ? row_of(i) : 0);
    source[i] = memory.memory_row(at_most(row, rows.end - 1)) + depth.begin;
  }
  for (int64_t of_line = 0; of_line < depth.size(); of_line += kDepthOfLine) {
    const int64_t end = at_most(of_line + kDepthOfLine, depth.size());
    for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
      const T* const* of_chunk = source + chunk * kLanesOfChunk;
      for (int64_t done = of_line; done < end; done += kDepthOfBlock) {
        Element* const of_block = target + done / kDepthPerStep<Element> * kWidth + chunk * kLanesOfChunk;
        if (done + kDepthOfBlock <= depth.size()) {
          pack_block_along_depth(of_chunk, done, of_block, kWidth);
        } else {
          pack_last_block_along_depth(of_chunk, done, depth.size() - done, of_block, kWidth);
        }
      }
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
