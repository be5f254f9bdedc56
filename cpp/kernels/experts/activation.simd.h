// The activations of the experts, on blocks of one row.
#pragma once

#include <Eigen/Core>
#include <cmath>

#include "kernels/experts/activation.h"
#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A block of a row. Its maximum size is part of the type, so that Eigen stores it on the stack.
template <class S>
using Block = Eigen::Array<S, Eigen::Dynamic, 1, Eigen::ColMajor, kColumnBlock, 1>;

// Operations on blocks.
template <class S>
struct BlockMath {
  using Scalar = S;
  using Value = Block<S>;

  MAXMOE_INLINE static auto exp(const auto& x) { return x.exp(); }
  MAXMOE_INLINE static auto tanh(const auto& x) { return x.tanh(); }
  MAXMOE_INLINE static auto erf(const auto& x) {
    return x.unaryExpr([](S v) { return std::erf(v); });
  }
  MAXMOE_INLINE static auto sigmoid(const auto& x) { return (S(1) + (-x).exp()).inverse(); }
  MAXMOE_INLINE static auto square(const auto& x) { return x.square(); }
  MAXMOE_INLINE static auto cube(const auto& x) { return x.cube(); }
  MAXMOE_INLINE static auto abs(const auto& x) { return x.abs(); }
  MAXMOE_INLINE static auto positive(const auto& x) { return (x <= S(0)).select(S(0), x); }
  MAXMOE_INLINE static auto at_most(const auto& x, S limit) { return x.template min<Eigen::PropagateNaN>(limit); }
  MAXMOE_INLINE static auto between(const auto& x, S limit) {
    return x.template min<Eigen::PropagateNaN>(limit).template max<Eigen::PropagateNaN>(-limit);
  }
  MAXMOE_INLINE static auto zero_where(const auto& condition, const auto& x) { return condition.select(S(0), x); }
  MAXMOE_INLINE static auto one_where(const auto& condition) { return condition.template cast<S>(); }
};

// Reads and writes a block in the accumulator's type. The stride is 2 for interleaved gate and up.
template <class T>
Block<Accumulator<T>> load_block(const T* source, int64_t stride, int64_t size) {
  Block<Accumulator<T>> block(size);
  if (stride == 1) {
    widen_row(source, block.data(), size);
  } else {
    for (int64_t i = 0; i < size; ++i) block[i] = widen(source[i * stride]);
  }
  return block;
}

template <class T>
void store_block(const Block<Accumulator<T>>& block, T* target, int64_t stride) {
  if (stride == 1) {
    narrow_row<T>(block.data(), target, block.size());
  } else {
    for (int64_t i = 0; i < block.size(); ++i) target[i * stride] = narrow<T>(block[i]);
  }
}

// Activates columns [begin, begin + size) of a row of preactivations.
template <class T, bool kWithSlope>
Activated<BlockMath<Accumulator<T>>> activate_block(const ActivationKind& kind, const T* preactivations, int64_t width,
                                                    int64_t begin, int64_t size) {
  using S = Accumulator<T>;
  const PreactivationColumns columns = preactivation_columns(kind.gate, width, begin);
  const Block<S> up = load_block(preactivations + columns.up, columns.stride, size);
  const bool has_gate = kind.gate != GateLayout::none;
  const Block<S> gate = has_gate ? load_block(preactivations + columns.gate, columns.stride, size) : Block<S>();
  return activate_pair<BlockMath<S>, kWithSlope>(kind, gate, up);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
