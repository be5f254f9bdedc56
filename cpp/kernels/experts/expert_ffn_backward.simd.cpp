// The backward pass of the experts. Like the forward pass it works on tiles, but for the gradients of the parameters,
// which are sums over all rows of an expert.
#include "kernels/experts/activation.simd.h"
#include "kernels/experts/expert_ffn.h"
#include "kernels/experts/expert_tasks.simd.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/rows/ragged_gather_reduce.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The scratch slots: dA of a tile, or a block of columns of A.
constexpr int kGradActivatedScratch = 1;
constexpr int kActivatedScratch = 1;

// The routing weight of a slot; 1 without weights.
template <class Arguments>
auto weight_of_slot(const Arguments& a, int64_t slot) {
  return a.weights == nullptr ? std::remove_cvref_t<decltype(*a.weights)>(1) : a.weights[slot];
}

// The product that computes `out`, one of the gradients of a stack or a part of it.
template <class T>
Product<T> product_of_gradient(GemmOperand<T> rhs, MatrixView<T> out, const MatrixStack<T>& gradients) {
  Product<T> product{rhs, out, false};
  product.is_nontemporal = is_nontemporal_gradient(gradients);
  return product;
}

// out = lhs^T * rhs, the gradient of a weight; a product over no rows is zero. A product is written row by row. If
// `out` is transposed, like the weights of linear layers, the transposed product is computed.
template <class T>
void multiply_transposed(const Gemm<T>& gemm, GemmOperand<T> lhs, GemmOperand<T> rhs, MatrixView<T> out,
                         const MatrixStack<T>& gradients) {
  if (out.column_stride == 1) return gemm.multiply(lhs.transposed(), product_of_gradient(rhs, out, gradients));
  gemm.multiply(rhs.transposed(), product_of_gradient(lhs, out.transposed(), gradients));
}

// Backward of the activation for one row: Z becomes dZ, A becomes weight * A. Returns <dA, A>. Z stays if dA is null.
template <class T>
Accumulator<T> activate_backward_row(const ExpertFfnBackwardDown<T>& a, int64_t row, Accumulator<T> weight,
                                     const T* grad_activated) {
  using S = Accumulator<T>;
  const int64_t width = a.experts.down.rows();
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

// Computes the gradients of the reduced rows of a tile, and the reduced rows times their weights.
template <class T>
void grad_reduced_tile(const ExpertFfnBackwardDownFactors<T>& a, const GroupTile& tile) {
  if (a.grad_reduced.data != nullptr) {
    a.gemm->multiply(
        tokens_of(a.grad_out, a.routed, tile.begin, tile.end),
        {a.experts.down.factors.b[tile.group].transposed(), a.grad_reduced.row_range(tile.begin, tile.end), false});
  }
  for (int64_t r = tile.begin; r < tile.end && a.weighted_reduced.data != nullptr; ++r) {
    scale_row(a.reduced.row(r), weight_of_slot(a, a.routed.slots[r]), a.weighted_reduced.row(r), a.reduced.columns);
  }
}

// The gradient of the factor `a` of down for one expert, in rows [begin, end) of the intermediate size: (weights * A)^T
// times the gradients of the reduced rows. A block of columns of A is work space.
template <class T>
void grad_a_of_down_rows(const ExpertFfnBackwardDownFactors<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const int64_t height = rows.end - rows.begin;
  const ConstMatrixView<T> preactivations = a.preactivations.row_range(rows.begin, rows.end);
  const ConstMatrixView<T> grad_reduced = a.grad_reduced.row_range(rows.begin, rows.end).as_const();
  for (int64_t first = begin; first < end; first += kColumnBlock) {
    const int64_t columns = at_most(end - first, kColumnBlock);
    const MatrixView<T> activated{scratch<T>(kActivatedScratch, height * columns), height, columns, columns};
    for (int64_t r = 0; r < height; ++r) {
      const auto block = activate_block<T, false>(a.kind, preactivations.row(r), a.grad_a.first.rows, first, columns);
      store_block<T>(weight_of_slot(a, a.routed.slots[rows.begin + r]) * block.activated, activated.row(r), 1);
    }
    multiply_transposed<T>(*a.gemm, activated.as_const(), grad_reduced,
                           a.grad_a[rows.group].row_range(first, first + columns), a.grad_a);
  }
}

// Computes dZ, weights * A and the gradients of the weights for the rows of a tile.
template <class T>
void grad_preactivations_tile(const ExpertFfnBackwardDown<T>& a, const GroupTile& tile, int64_t next_group) {
  const int64_t height = tile.end - tile.begin;
  const int64_t width = a.experts.down.rows();
  const GemmOperand<T> grad_out = tokens_of(a.grad_out, a.routed, tile.begin, tile.end);
  MatrixView<T> grad_activated;
  if (!a.keeps_preactivations) {
    grad_activated = {scratch<T>(kGradActivatedScratch, height * width), height, width, width};
    Product<T> product{a.experts.down.weights[tile.group].transposed(), grad_activated};
    product.next_b = a.experts.down.weights[next_group].transposed();
    if (!a.experts.down.factors.empty()) {
      product.reduced = a.grad_reduced.row_range(tile.begin, tile.end);
      product.expand = a.experts.down.factors.a[tile.group].transposed();
    }
    a.gemm->multiply(grad_out, product);
  }
  for (int64_t r = 0; r < height; ++r) {
    const int64_t slot = a.routed.slots[tile.begin + r];
    auto grad_weight = activate_backward_row(a, tile.begin + r, weight_of_slot(a, slot), grad_activated.row(r));
    if (a.grad_weights == nullptr) continue;
    // The output of the expert is A down + bias: the bias is a second term of the gradient of its weight.
    if (a.experts.down.has_bias()) {
      grad_weight += dot_rows<T>(grad_out.memory_row(r), a.experts.down.bias.row(tile.group), a.grad_out.columns);
    }
    a.grad_weights[slot] = grad_weight;
  }
}

// Adds the products of `grad`, columns of dZ, with the transpose of a projection to the rows of a tile. `product` has
// the transposed matrix already.
template <class T>
void add_grad_rows(const Gemm<T>& gemm, ConstMatrixView<T> grad, Product<T> product, const Projection<T>& projection,
                   int64_t group, MatrixView<T> grad_reduced) {
  Product<T> products[2];
  int64_t count = 0;
  if (!projection.factors.empty()) {
    products[count++] = {projection.factors.b[group].transposed(), grad_reduced, false};
    product.reduced = grad_reduced.as_const();
    product.expand = projection.factors.a[group].transposed();
  }
  if (product.c.data != nullptr) products[count++] = product;
  gemm.multiply(grad, products, count);
}

// Computes dZ [gate | up]^T for the rows of a tile, and the gradients of the reduced rows. A separate gate is a second
// product, added to the first.
template <class T>
void grad_rows_tile(const ExpertFfnBackwardInput<T>& a, const GroupTile& tile, int64_t next_group) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(tile.begin, tile.end);
  const MatrixView<T> rows = a.rows.row_range(tile.begin, tile.end);
  const ReducedRows<T> reduced = a.grad_reduced.row_range(tile.begin, tile.end);
  const int64_t gate_width = a.experts.gate.columns();
  const GemmOperand<T> next_up = a.experts.up.weights[next_group].transposed();
  const GemmOperand<T> gate = a.experts.gate.empty() ? next_up : a.experts.gate.weights[tile.group].transposed();
  Product<T> of_up{a.experts.up.weights[tile.group].transposed(), rows};
  of_up.next_b = gate;
  add_grad_rows<T>(*a.gemm, up_columns(grad, gate_width), of_up, a.experts.up, tile.group, reduced.up);
  if (a.experts.gate.empty()) return;
  Product<T> of_gate{gate, rows, true};
  of_gate.next_b = next_up;
  add_grad_rows<T>(*a.gemm, gate_columns(grad, gate_width), of_gate, a.experts.gate, tile.group, reduced.gate);
}

// Gradients of down, of its factor `b` and of its bias for one expert, in columns [begin, end) of the hidden size.
template <class T>
void grad_down_columns(const ExpertFfnBackwardDown<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const ConstMatrixView<T> columns = a.grad_out.column_range(begin, end);
  const auto multiply = [&](ConstMatrixView<T> lhs, const MatrixStack<T>& gradients) {
    if (gradients.empty()) return;
    multiply_transposed<T>(*a.gemm, lhs.row_range(rows.begin, rows.end),
                           tokens_of(columns, a.routed, rows.begin, rows.end),
                           gradients[rows.group].column_range(begin, end), gradients);
  };
  multiply(a.activated.as_const(), a.grad_down);
  multiply(a.weighted_reduced, a.grad_b);
  if (a.grad_bias.data != nullptr) {
    const int64_t* slots = a.routed.slots + rows.begin;
    const auto token = [&](int64_t r) { return slots[r] / a.routed.top_k; };
    const auto weight = [&](int64_t r) { return weight_of_slot(a, slots[r]); };
    sum_weighted_rows<T>(columns, rows.end - rows.begin, token, weight, a.grad_bias.row(rows.group) + begin);
  }
}

// Gradients of gate, of up and of their factors `a` for one expert, in rows [begin, end) of the hidden size.
template <class T>
void grad_up_rows(const ExpertFfnBackwardUp<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(rows.begin, rows.end);
  const GemmOperand<T> tokens = tokens_of(a.x.column_range(begin, end), a.routed, rows.begin, rows.end);
  Product<T> products[4];
  int64_t count = 0;
  const auto add = [&](const MatrixStack<T>& gradient, ConstMatrixView<T> rhs) {
    if (gradient.empty()) return;
    const MatrixView<T> out = gradient[rows.group].row_range(begin, end);
    // Row-major gradients share the packed tokens. A transposed gradient has another left-hand side, so
    // it is computed separately.
    if (out.column_stride != 1) return multiply_transposed<T>(*a.gemm, tokens, rhs, out, gradient);
    products[count++] = product_of_gradient<T>(rhs, out, gradient);
  };
  add(a.gate.weights, gate_columns(grad, a.experts.gate.columns()));
  add(a.up.weights, up_columns(grad, a.experts.gate.columns()));
  add(a.gate.a, a.gate.reduced.row_range(rows.begin, rows.end));
  add(a.up.a, a.up.reduced.row_range(rows.begin, rows.end));
  if (count > 0) a.gemm->multiply(tokens.transposed(), products, count);
}

// Gradients of the biases of gate and up for one expert: the sum of dZ over its rows.
template <class T>
void grad_up_biases(const ExpertFfnBackwardUp<T>& a, const GroupTile& rows) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(rows.begin, rows.end);
  const auto one = [](int64_t) { return Accumulator<T>(1); };
  const auto same = [](int64_t r) { return r; };
  const auto sum_rows = [&](ConstMatrixView<T> columns, MatrixView<T> bias) {
    if (bias.data != nullptr) sum_weighted_rows<T>(columns, grad.rows, same, one, bias.row(rows.group));
  };
  sum_rows(up_columns(grad, a.experts.gate.columns()), a.up.bias);
  sum_rows(gate_columns(grad, a.experts.gate.columns()), a.gate.bias);
}

}  // namespace

template <class T>
void expert_ffn_backward_down_factors(const ExpertFfnBackwardDownFactors<T>& a, const Executor& executor) {
  const int64_t rank = a.experts.down.factors.rank();
  run_tiles(a, a.preactivations.rows, a.grad_out.columns, a.grad_out.columns * rank, executor,
            [&](const GroupTile& tile, int64_t /*next_group*/) { grad_reduced_tile(a, tile); });
  if (a.grad_a.empty()) return;
  const int64_t width = a.grad_a.first.rows;
  run_groups(a.routed, width, width * rank, executor,
             [&](const GroupTile& rows, int64_t begin, int64_t end) { grad_a_of_down_rows(a, rows, begin, end); });
}

// Two passes over the rows: the gradient of down is a sum over all rows of an expert, which needs the tiles of the
// first pass to be finished.
template <class T>
void expert_ffn_backward_down(const ExpertFfnBackwardDown<T>& a, const Executor& executor) {
  const int64_t hidden_size = a.grad_out.columns;
  const int64_t multiply_adds = hidden_size * a.experts.down.rows();
  run_tiles(a, a.preactivations.rows, hidden_size, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { grad_preactivations_tile(a, tile, next_group); });
  if (a.grad_down.empty() && a.grad_b.empty() && a.grad_bias.data == nullptr) return;
  run_groups(a.routed, hidden_size, multiply_adds, executor,
             [&](const GroupTile& rows, int64_t begin, int64_t end) { grad_down_columns(a, rows, begin, end); });
}

// The rows are summed without weights, because dZ contains them already.
template <class T>
void expert_ffn_backward_input(const ExpertFfnBackwardInput<T>& a, const Executor& executor) {
  const int64_t multiply_adds = a.experts.up.rows() * a.grad_preactivations.columns;
  run_tiles(a, a.grad_preactivations.rows, a.grad_preactivations.columns, multiply_adds, executor,
            [&](const GroupTile& tile, int64_t next_group) { grad_rows_tile(a, tile, next_group); });
  if (a.grad_x.data == nullptr) return;
  ragged_gather_reduce(
      RaggedGatherReduce<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, nullptr, nullptr, a.grad_x},
      executor);
}

template <class T>
void expert_ffn_backward_up(const ExpertFfnBackwardUp<T>& a, const Executor& executor) {
  const int64_t multiply_adds = a.x.columns * a.grad_preactivations.columns;
  run_groups(a.routed, a.x.columns, multiply_adds, executor, [&](const GroupTile& rows, int64_t begin, int64_t end) {
    grad_up_rows(a, rows, begin, end);
    // The biases do not depend on the hidden size: the first task of an expert computes them.
    if (begin == 0) grad_up_biases(a, rows);
  });
}

MAXMOE_INSTANTIATE(expert_ffn_backward_down_factors, ExpertFfnBackwardDownFactors)
MAXMOE_INSTANTIATE(expert_ffn_backward_down, ExpertFfnBackwardDown)
MAXMOE_INSTANTIATE(expert_ffn_backward_input, ExpertFfnBackwardInput)
MAXMOE_INSTANTIATE(expert_ffn_backward_up, ExpertFfnBackwardUp)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
