#include "expert_ffn.h"

#include "activation.h"
#include "expert_tasks.h"
#include "ragged_unsort.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The scratch slots of a tile: A and Z in the forward pass, dA in the backward pass.
constexpr int kActivatedScratch = 1;
constexpr int kPreactivationsScratch = 2;
constexpr int kGradActivatedScratch = 1;

// F, the number of rows of down.
template <class T>
int64_t intermediate_size(const ExpertWeights<T>& experts) {
  return experts.down.first.rows;
}

// Number of columns of the preactivations Z.
template <class T>
int64_t preactivation_width(const ExpertWeights<T>& experts) {
  return experts.gate.first.columns + experts.up.first.columns;
}

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

// The product out = a * b + bias for some a. The bias is copied to `out`, and the product is added to it.
template <class T>
Product<T> product_with_bias(ConstMatrixView<T> b, const T* bias, MatrixView<T> out, ConstMatrixView<T> next_b) {
  for (int64_t r = 0; r < out.rows && bias != nullptr; ++r) copy_row(bias, out.row(r), out.columns);
  return {b, out, bias != nullptr, next_b};
}

// The bias of one expert; null without biases.
template <class T>
const T* bias_row(ConstMatrixView<T> bias, int64_t group) {
  return bias.data == nullptr ? nullptr : bias.row(group);
}

// A = activation(Z), in blocks of columns that stay in the first-level cache.
template <class T>
void activate_rows(const ActivationKind& kind, MatrixView<T> preactivations, MatrixView<T> activated) {
  for (int64_t r = 0; r < activated.rows; ++r) {
    for (int64_t begin = 0; begin < activated.columns; begin += kColumnBlock) {
      const int64_t size = at_most(activated.columns - begin, kColumnBlock);
      const auto block = activate_block<T, false>(kind, preactivations.row(r), activated.columns, begin, size);
      narrow_row<T>(block.activated.data(), activated.row(r) + begin, size);
    }
  }
}

// Whether only Z is computed: the backward pass recomputes it if it was not kept.
template <class T>
bool wants_only_preactivations(const ExpertFfn<T>& a) {
  return a.out.data == nullptr;
}

// Computes one tile: preactivations, activation and the output rows. The tile stays in a cache from one product to the
// next. `next_group` is the group that this thread will probably compute next; its first matrix is prefetched at the
// end.
template <class T>
void forward_tile(const ExpertFfn<T>& a, const GroupTile& tile, int64_t next_group) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t width = intermediate_size(experts);

  const GemmOperand<T> tokens = tokens_of(a.x, a.routed, tile.begin, tile.end);
  const MatrixView<T> activated{scratch<T>(kActivatedScratch, height * width), height, width, width};
  // Z is stored for the backward pass, or in scratch memory if the caller does not keep it.
  MatrixView<T> preactivations;
  if (a.preactivations.data != nullptr) {
    preactivations = a.preactivations.row_range(tile.begin, tile.end);
  } else {
    const int64_t columns = preactivation_width(experts);
    preactivations = {scratch<T>(kPreactivationsScratch, height * columns), height, columns, columns};
  }

  const int64_t gate_width = experts.gate.first.columns;
  const ConstMatrixView<T> up = experts.up[tile.group];
  const ConstMatrixView<T> down = experts.down[tile.group];
  const ConstMatrixView<T> of_next_tile = experts.gate.empty() ? experts.up[next_group] : experts.gate[next_group];
  // gate and up are products of the same tokens, which are packed once.
  Product<T> products[2];
  int64_t count = 0;
  if (a.kind.gate == GateLayout::separate) {
    products[count++] = product_with_bias(experts.gate[tile.group], bias_row(experts.gate_bias, tile.group),
                                          gate_columns(preactivations, gate_width), up);
  }
  products[count++] =
      product_with_bias(up, bias_row(experts.up_bias, tile.group), up_columns(preactivations, gate_width),
                        wants_only_preactivations(a) ? of_next_tile : down);
  a.gemm->multiply(tokens, products, count);
  if (wants_only_preactivations(a)) return;
  activate_rows(a.kind, preactivations, activated);
  a.gemm->multiply(activated.as_const(), product_with_bias(down, bias_row(experts.down_bias, tile.group),
                                                           a.rows.row_range(tile.begin, tile.end), of_next_tile));
}

// Backward of the activation for one row: Z becomes dZ, A becomes weight * A. Returns <dA, A>. Z stays if dA is null.
template <class T>
Accumulator<T> activate_backward_row(const ExpertFfnBackwardDown<T>& a, int64_t row, Accumulator<T> weight,
                                     const T* grad_activated) {
  using S = Accumulator<T>;
  const int64_t width = a.down.first.rows;
  T* preactivations = a.preactivations.row(row);
  S grad_weight = 0;
  for (int64_t begin = 0; begin < width; begin += kColumnBlock) {
    const int64_t size = at_most(width - begin, kColumnBlock);
    // A is recomputed from Z. This costs an exponential per element, and no memory between the passes.
    const auto block = activate_block<T, true>(a.kind, preactivations, width, begin, size);
    const PreactivationColumns columns = preactivation_columns(a.kind.gate, width, begin);
    if (a.activated.data != nullptr) store_block<T>(weight * block.activated, a.activated.row(row) + begin, 1);
    if (grad_activated == nullptr) continue;
    Block<S> grad = load_block(grad_activated + begin, 1, size);
    grad_weight += (grad * block.activated).sum();
    // <dA, A> is taken first, because the gradient of the weight is computed from the unweighted output.
    grad *= weight;
    store_block<T>(grad * block.up_slope, preactivations + columns.up, columns.stride);
    if (a.kind.gate != GateLayout::none) {
      store_block<T>(grad * block.gate_slope, preactivations + columns.gate, columns.stride);
    }
  }
  return grad_weight;
}

// The routing weight of a slot; 1 without weights.
template <class T>
Accumulator<T> weight_of_slot(const ExpertFfnBackwardDown<T>& a, int64_t slot) {
  return a.weights == nullptr ? Accumulator<T>(1) : a.weights[slot];
}

// Computes dZ, weights * A and the gradients of the weights for the rows of a tile.
template <class T>
void grad_preactivations_tile(const ExpertFfnBackwardDown<T>& a, const GroupTile& tile, int64_t next_group) {
  const int64_t height = tile.end - tile.begin;
  const int64_t width = a.down.first.rows;
  const GemmOperand<T> grad_out = tokens_of(a.grad_out, a.routed, tile.begin, tile.end);
  MatrixView<T> grad_activated;
  if (!a.keeps_preactivations) {
    grad_activated = {scratch<T>(kGradActivatedScratch, height * width), height, width, width};
    const ConstMatrixView<T> next_down = a.down[next_group].transposed();
    a.gemm->multiply(grad_out, {a.down[tile.group].transposed(), grad_activated, false, next_down});
  }
  for (int64_t r = 0; r < height; ++r) {
    const int64_t slot = a.routed.slots[tile.begin + r];
    auto grad_weight = activate_backward_row(a, tile.begin + r, weight_of_slot(a, slot), grad_activated.row(r));
    if (a.grad_weights == nullptr) continue;
    // The output of the expert is A down + bias: the bias is a second term of the gradient of its weight.
    if (a.down_bias.data != nullptr) {
      grad_weight += dot_rows<T>(grad_out.memory_row(r), a.down_bias.row(tile.group), a.grad_out.columns);
    }
    a.grad_weights[slot] = grad_weight;
  }
}

// Computes dZ [gate | up]^T for the rows of a tile. A separate gate is a second product, added to the first.
template <class T>
void grad_rows_tile(const ExpertFfnBackwardInput<T>& a, const GroupTile& tile, int64_t next_group) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(tile.begin, tile.end);
  const MatrixView<T> rows = a.rows.row_range(tile.begin, tile.end);
  const int64_t gate_width = a.gate.first.columns;
  const ConstMatrixView<T> next_up = a.up[next_group].transposed();
  const ConstMatrixView<T> up = a.up[tile.group].transposed();
  if (a.gate.empty()) return a.gemm->multiply(grad, {up, rows, false, next_up});
  const ConstMatrixView<T> gate = a.gate[tile.group].transposed();
  a.gemm->multiply(up_columns(grad, gate_width), {up, rows, false, gate});
  a.gemm->multiply(gate_columns(grad, gate_width), {gate, rows, true, next_up});
}

// out = lhs^T * rhs, the gradient of a weight; a product over no rows is zero. A product is written row by row. If
// `out` is transposed, like the weights of linear layers, the transposed product is computed.
template <class T>
void multiply_transposed(const Gemm<T>& gemm, GemmOperand<T> lhs, GemmOperand<T> rhs, MatrixView<T> out) {
  if (out.column_stride == 1) return gemm.multiply(lhs.transposed(), {rhs, out, false});
  gemm.multiply(rhs.transposed(), {lhs, out.transposed(), false});
}

// Gradients of down and its bias for one expert, in columns [begin, end) of the hidden size.
template <class T>
void grad_down_columns(const ExpertFfnBackwardDown<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const ConstMatrixView<T> columns = a.grad_out.column_range(begin, end);
  if (!a.grad_down.empty()) {
    multiply_transposed<T>(*a.gemm, a.activated.row_range(rows.begin, rows.end).as_const(),
                           tokens_of(columns, a.routed, rows.begin, rows.end),
                           a.grad_down[rows.group].column_range(begin, end));
  }
  if (a.grad_down_bias.data != nullptr) {
    const int64_t* slots = a.routed.slots + rows.begin;
    const auto token = [&](int64_t r) { return slots[r] / a.routed.top_k; };
    const auto weight = [&](int64_t r) { return weight_of_slot(a, slots[r]); };
    sum_weighted_rows<T>(columns, rows.end - rows.begin, token, weight, a.grad_down_bias.row(rows.group) + begin);
  }
}

// Gradients of gate and up for one expert, in rows [begin, end) of the hidden size.
template <class T>
void grad_up_rows(const ExpertFfnBackwardUp<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(rows.begin, rows.end);
  const GemmOperand<T> tokens = tokens_of(a.x.column_range(begin, end), a.routed, rows.begin, rows.end);
  Product<T> products[2];
  int64_t count = 0;
  const auto add = [&](const MatrixStack<T>& gradient, ConstMatrixView<T> rhs) {
    if (gradient.empty()) return;
    const MatrixView<T> out = gradient[rows.group].row_range(begin, end);
    // Row-major gradients of gate and up share the packed tokens. A transposed gradient has another left-hand side, so
    // it is computed separately.
    if (out.column_stride != 1) return multiply_transposed<T>(*a.gemm, tokens, rhs, out);
    products[count++] = {rhs, out, false};
  };
  add(a.grad_gate, gate_columns(grad, a.gate_width));
  add(a.grad_up, up_columns(grad, a.gate_width));
  if (count > 0) a.gemm->multiply(tokens.transposed(), products, count);
}

// Gradients of the biases of gate and up for one expert: the sum of dZ over its rows.
template <class T>
void grad_up_biases(const ExpertFfnBackwardUp<T>& a, const GroupTile& rows) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(rows.begin, rows.end);
  const auto one = [](int64_t) { return Accumulator<T>(1); };
  const auto same = [](int64_t r) { return r; };
  if (a.grad_up_bias.data != nullptr) {
    sum_weighted_rows<T>(up_columns(grad, a.gate_width), grad.rows, same, one, a.grad_up_bias.row(rows.group));
  }
  if (a.grad_gate_bias.data != nullptr) {
    sum_weighted_rows<T>(gate_columns(grad, a.gate_width), grad.rows, same, one, a.grad_gate_bias.row(rows.group));
  }
}

}  // namespace

// The rows of a token are summed in a second pass, in the order of its slots. Adding them inside the tasks would need
// atomics, and the order of the sum would depend on the threads.
template <class T>
void expert_ffn(const ExpertFfn<T>& a, const Executor& executor) {
  const int64_t width = intermediate_size(a.experts);
  const int64_t multiply_adds = a.x.columns * (preactivation_width(a.experts) + width);
  const int64_t depth = a.x.columns < width ? width : a.x.columns;
  const int64_t num_rows = wants_only_preactivations(a) ? a.preactivations.rows : a.rows.rows;
  run_tiles(a, num_rows, depth, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { forward_tile(a, tile, next_group); });
  if (wants_only_preactivations(a)) return;
  ragged_unsort(RaggedUnsort<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, a.weights, a.out}, executor);
}

// Two passes over the rows: the gradient of down is a sum over all rows of an expert, which needs the tiles of the
// first pass to be finished.
template <class T>
void expert_ffn_backward_down(const ExpertFfnBackwardDown<T>& a, const Executor& executor) {
  const int64_t hidden_size = a.grad_out.columns;
  const int64_t multiply_adds = hidden_size * a.down.first.rows;
  run_tiles(a, a.preactivations.rows, hidden_size, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { grad_preactivations_tile(a, tile, next_group); });
  if (a.grad_down.empty() && a.grad_down_bias.data == nullptr) return;
  run_experts(a, hidden_size, multiply_adds, executor,
              [&](const GroupTile& rows, int64_t begin, int64_t end) { grad_down_columns(a, rows, begin, end); });
}

// The rows are summed without weights, because dZ contains them already.
template <class T>
void expert_ffn_backward_input(const ExpertFfnBackwardInput<T>& a, const Executor& executor) {
  const int64_t multiply_adds = a.grad_x.columns * a.grad_preactivations.columns;
  run_tiles(a, a.rows.rows, a.grad_preactivations.columns, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { grad_rows_tile(a, tile, next_group); });
  ragged_unsort(RaggedUnsort<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, nullptr, a.grad_x}, executor);
}

template <class T>
void expert_ffn_backward_up(const ExpertFfnBackwardUp<T>& a, const Executor& executor) {
  const int64_t multiply_adds = a.x.columns * a.grad_preactivations.columns;
  run_experts(a, a.x.columns, multiply_adds, executor, [&](const GroupTile& rows, int64_t begin, int64_t end) {
    if (!a.grad_up.empty() || !a.grad_gate.empty()) grad_up_rows(a, rows, begin, end);
    // The biases do not depend on the hidden size: the first task of an expert computes them.
    if (begin == 0) grad_up_biases(a, rows);
  });
}

MAXMOE_INSTANTIATE(expert_ffn, ExpertFfn)
MAXMOE_INSTANTIATE(expert_ffn_backward_down, ExpertFfnBackwardDown)
MAXMOE_INSTANTIATE(expert_ffn_backward_input, ExpertFfnBackwardInput)
MAXMOE_INSTANTIATE(expert_ffn_backward_up, ExpertFfnBackwardUp)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
