// The steps of a matrix that is contiguous along the inner dimension, transposed in registers.
//
// With AVX-512 a block is transposed while the block before it is multiplied. In one go its shuffles and its
// multiply-adds waited for each other: 12 rows of bfloat16 in a cache took 4.8 ns for a cache line instead of 4.1 (AMD
// Zen 4 class). So the transpose is divided into operations of one to four instructions, which run between the
// multiply-adds.
#pragma once

#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether blocks are transposed while others are multiplied: two blocks and the accumulators of 12 rows need the
// registers of AVX-512.
constexpr bool kTransposesMeanwhile = kVectorRegisters == 32 && kVectorBytes == 64;

// One of the two vectors of columns in NR rows of memory.
template <class T>
struct ColumnVector {
  ConstMatrixView<T> memory;
  int vector;

  MAXMOE_INLINE const T* column(int lane) const { return memory.row(column_of_lane<T>(vector, lane)); }
};

// Concatenates the lower halves of two vectors, or the upper ones.
template <bool kUpper, class V, int... kLane>
MAXMOE_INLINE V halves(V a, V b, std::integer_sequence<int, kLane...> /*lanes*/) {
  constexpr int kCount = static_cast<int>(sizeof...(kLane));
  return __builtin_shufflevector(a, b, (kLane % (kCount / 2) + kUpper * kCount / 2 + kLane / (kCount / 2) * kCount)...);
}
template <bool kUpper, class V>
MAXMOE_INLINE V halves(V a, V b) {
  return halves<kUpper>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

// Divides kCount indices into kParts parts of about the same size, and calls body<kIndex>() for the indices of part
// kPart.
template <int kPart, int kParts, int kCount, class Body>
MAXMOE_INLINE void for_part(const Body& body) {
  constexpr int kBegin = kCount * kPart / kParts;
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...> /*indices*/) MAXMOE_INLINE_LAMBDA {
    (body.template operator()<kBegin + kIndex>(), ...);
  }(std::make_integer_sequence<int, kCount*(kPart + 1) / kParts - kBegin>());
}

// Half a block: kSteps steps of kLanes columns. Register i begins with halves of two columns and ends with step i. The
// registers are two groups of kBlock: the operations transpose each group within blocks of 16 bytes, and then split the
// blocks of both groups into even and odd ones.
template <class S>
struct HalfBlock {
  static constexpr int kBlock = Shuffle<S>::kBlock;
  static constexpr int kSteps = kLanes<S> / 2;
  static constexpr int kInterleaves = kBlock == 2 ? 1 : 4;
  static constexpr int kOperations = 2 * kInterleaves + kBlock;
  static_assert(kSteps == 2 * kBlock || !kTransposesMeanwhile);

  // The column in the lower half of register i before the transpose. The column in the upper half is kBlock lanes
  // further.
  static constexpr int lane_of(int i) { return i / kBlock * 2 * kBlock + i % kBlock; }

  template <int kIndex>
  MAXMOE_INLINE void operation() {
    if constexpr (kIndex < 2 * kInterleaves) {
      interleave_within_blocks<S, kIndex % kInterleaves>(steps + kIndex / kInterleaves * kBlock);
    } else {
      constexpr int kStep = kIndex - 2 * kInterleaves;
      split_blocks<S>(steps[kStep], steps[kBlock + kStep]);
    }
  }

  Vector<S> steps[kSteps];
};

// The first half of a block, transposed, and its second half, not yet.
template <class S>
class TransposedBlock {
  using Half = HalfBlock<S>;

 public:
  static constexpr int kSteps = Half::kSteps;
  static constexpr int64_t kDepth = kLanes<S> * kDepthPerStep<S>;

  // Runs part kPart of kSteps of the operations that transpose the second half.
  template <int kPart>
  MAXMOE_INLINE void transpose_second() {
    for_part<kPart, kSteps, Half::kOperations>([&]<int kIndex>()
                                                   MAXMOE_INLINE_LAMBDA { second.template operation<kIndex>(); });
  }

  // Runs part kPart of kParts of the operations that load a block, from depth d on, and transpose its first half.
  template <int kPart, int kParts, class T>
  MAXMOE_INLINE void load_and_transpose_first(const ColumnVector<T>& columns, int64_t d) {
    for_part<kPart, kParts, kSteps + Half::kOperations>([&]<int kIndex>() MAXMOE_INLINE_LAMBDA {
      if constexpr (kIndex < kSteps) {
        constexpr int kLane = Half::lane_of(kIndex);
        const Vector<S> lower = load_along_depth<S>(columns.column(kLane) + d);
        const Vector<S> upper = load_along_depth<S>(columns.column(kLane + Half::kBlock) + d);
        first.steps[kIndex] = halves<false>(lower, upper);
        second.steps[kIndex] = halves<true>(lower, upper);
      } else {
        first.template operation<kIndex - kSteps>();
      }
    });
  }

  Half first;
  Half second;
};

// The first block of a vector of columns. Nothing is read without kTransposesMeanwhile, or if the columns are shorter
// than a block.
template <class S, class T>
MAXMOE_INLINE TransposedBlock<S> first_block(const ColumnVector<T>& columns) {
  TransposedBlock<S> block{};
  if constexpr (kTransposesMeanwhile) {
    if (columns.memory.columns >= TransposedBlock<S>::kDepth) block.template load_and_transpose_first<0, 1>(columns, 0);
  }
  return block;
}

// Calls body(step, values) for the steps of `block`. Meanwhile the next one is read, from depth d of `columns` on.
template <class S, class T, class Body>
MAXMOE_INLINE void for_steps_of_block(TransposedBlock<S>& block, int64_t step, const ColumnVector<T>& columns,
                                      int64_t d, const Body& body) {
  constexpr int kSteps = TransposedBlock<S>::kSteps;
  [&]<int... kStep>(std::integer_sequence<int, kStep...> /*steps*/) MAXMOE_INLINE_LAMBDA {
    ((body(step + kStep, block.first.steps[kStep]), block.template transpose_second<kStep>()), ...);
    const HalfBlock<S> second = block.second;
    ((body(step + kSteps + kStep, second.steps[kStep]),
      block.template load_and_transpose_first<kStep, kSteps>(columns, d)),
     ...);
  }(std::make_integer_sequence<int, kSteps>());
}

// Calls body(step, has_second, values) for the steps of a vector of columns in order; the last step of an odd depth has
// no second element of a pair. `block` is its first block, and becomes the first block of `following`, a vector of the
// same depth.
template <class S, class T, class Body>
MAXMOE_INLINE void for_transposed_steps(TransposedBlock<S>& block, const ColumnVector<T>& columns,
                                        const ColumnVector<T>& following, const Body& body) {
  constexpr int64_t kDepth = TransposedBlock<S>::kDepth;
  const int64_t depth = columns.memory.columns;
  int64_t d = 0;
  for (; d + kDepth <= depth; d += kDepth) {
    const int64_t first_step = d / kDepthPerStep<S>;
    const auto of_whole_step = [&](int64_t step, Vector<S> values) MAXMOE_INLINE_LAMBDA { body(step, true, values); };
    if constexpr (kTransposesMeanwhile) {
      const bool is_last = d + 2 * kDepth > depth;
      for_steps_of_block(block, first_step, is_last ? following : columns, is_last ? 0 : d + kDepth, of_whole_step);
    } else {
      Vector<S> steps[kLanes<S>];
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes<S>; ++lane) steps[lane] = load_along_depth<S>(columns.column(lane) + d);
      transpose_square<S>(steps);
#pragma GCC unroll 8
      for (int step = 0; step < kLanes<S>; ++step) of_whole_step(first_step + step, steps[step]);
    }
  }
  if (d == depth) return;
  Vector<S> steps[kLanes<S>];
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<S>; ++lane) steps[lane] = load_along_depth<S>(columns.column(lane) + d, depth - d);
  transpose_square<S>(steps);
  for (int64_t step = 0; step < steps_of_depth<S>(depth - d); ++step) {
    body(d / kDepthPerStep<S> + step, d + 2 * step + 1 < depth, steps[step]);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
