// The rows of the experts, as both passes of expert_ffn read them.
#pragma once

#include "kernels/experts/activation.simd.h"
#include "kernels/experts/expert_ffn.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The columns of Z or dZ of a separate gate, and the columns of up.
template <class View>
View gate_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(0, gate_width);
}

template <class View>
View up_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(gate_width, preactivations.columns);
}

// The tokens of rows [begin, end), as an operand that reads them by index: they are not gathered.
template <class T>
GemmOperand<T> tokens_of(ConstMatrixView<T> x, const RoutedRows& routed, int64_t begin, int64_t end) {
  return {x, routed.slots + begin, routed.top_k, end - begin};
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
