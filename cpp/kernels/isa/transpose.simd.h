// The transpose of a square block in vector registers: 16 x 16 numbers take 64 shuffles, and no access to memory.
#pragma once

#include <utility>

#include "kernels/isa/vector.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Shuffles two vectors: lane l of the result is lane pick(l) of a and b, where the lanes of b are numbered after those
// of a.
template <int (*pick)(int), class V, int... kLane>
MAXMOE_INLINE V shuffled(V a, V b, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(a, b, pick(kLane)...);
}

template <int (*pick)(int), class V>
MAXMOE_INLINE V shuffled(V a, V b) {
  return shuffled<pick>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

// The shuffles of a transpose. Instruction sets have shuffles of two registers that stay within blocks of 16 bytes, and
// shuffles of whole blocks, half of them from each register. A transpose of two stages needs no others.
template <class S>
struct Shuffle {
  static constexpr int kBlock = 16 / static_cast<int>(sizeof(S));  // lanes of a block
  static constexpr int kBlocks = kLanes<S> / kBlock;

  // Within blocks: interleaves their lower halves (low) or their upper halves (high).
  static constexpr int low(int lane) {
    const int within = lane % kBlock;
    return lane - within + within / 2 + within % 2 * kLanes<S>;
  }
  static constexpr int high(int lane) { return low(lane) + kBlock / 2; }

  // Across blocks: every other block of each register.
  static constexpr int even_blocks(int lane) {
    // Blocks L0 L1 L2 L3 and R0 R1 R2 R3 give L0 L2 R0 R2.
    constexpr int kOfEach = kBlocks < 2 ? 1 : kBlocks / 2;
    const int block = lane / kBlock;
    return 2 * (block % kOfEach) * kBlock + lane % kBlock + block / kOfEach * kLanes<S>;
  }
  static constexpr int odd_blocks(int lane) { return even_blocks(lane) + kBlock; }
};

// Number kIndex of the operations that transpose one block of each of kBlock rows: element [r][c] of a block becomes
// [c][r]. They are the first stage of a transpose.
template <class S, int kIndex>
MAXMOE_INLINE void interleave_within_blocks(Vector<S>* rows) {
  using Of = Shuffle<S>;
  // For rows a, b, c, d: first a0 c0 a1 c1 and b0 d0 b1 d1, and so on, then a0 b0 c0 d0, and so on.
  constexpr int kPairsOfFour[4][2] = {{0, 2}, {1, 3}, {0, 1}, {2, 3}};
  Vector<S>& a = rows[Of::kBlock == 2 ? 0 : kPairsOfFour[kIndex][0]];
  Vector<S>& b = rows[Of::kBlock == 2 ? 1 : kPairsOfFour[kIndex][1]];
  const Vector<S> low = shuffled<Of::low>(a, b);
  b = shuffled<Of::high>(a, b);
  a = low;
}

template <class S>
MAXMOE_INLINE void transpose_within_blocks(Vector<S>* rows) {
  interleave_within_blocks<S, 0>(rows);
  if constexpr (Shuffle<S>::kBlock == 4) {
    interleave_within_blocks<S, 1>(rows);
    interleave_within_blocks<S, 2>(rows);
    interleave_within_blocks<S, 3>(rows);
  }
}

// An operation of the second stage: `left` becomes the even blocks of both, `right` the odd ones.
template <class S>
MAXMOE_INLINE void split_blocks(Vector<S>& left, Vector<S>& right) {
  const Vector<S> even = shuffled<Shuffle<S>::even_blocks>(left, right);
  right = shuffled<Shuffle<S>::odd_blocks>(left, right);
  left = even;
}

// The second stage for four rows with four blocks each: the blocks are transposed as if each were one number.
template <class S>
MAXMOE_INLINE void transpose_blocks(Vector<S>& a, Vector<S>& b, Vector<S>& c, Vector<S>& d) {
  split_blocks<S>(a, b);
  split_blocks<S>(c, d);
  split_blocks<S>(a, c);
  split_blocks<S>(b, d);
}

// Transposes the block: rows[r][c] becomes rows[c][r]. The second stage transposes the blocks as if each were one
// number. All loops are unrolled, so that the rows stay in registers; a register has at most 4 blocks, and a block at
// most 4 lanes.
template <class S>
MAXMOE_INLINE void transpose_square(Vector<S> (&rows)[kLanes<S>]) {
  using Of = Shuffle<S>;
#pragma GCC unroll 4
  for (int block = 0; block < Of::kBlocks; ++block) transpose_within_blocks<S>(rows + block * Of::kBlock);
#pragma GCC unroll 4
  for (int i = 0; i < Of::kBlock; ++i) {
    Vector<S>* const of_block = rows + i;
    if constexpr (Of::kBlocks == 2) split_blocks<S>(of_block[0], of_block[Of::kBlock]);
    if constexpr (Of::kBlocks == 4) {
      transpose_blocks<S>(of_block[0], of_block[Of::kBlock], of_block[2 * Of::kBlock], of_block[3 * Of::kBlock]);
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
