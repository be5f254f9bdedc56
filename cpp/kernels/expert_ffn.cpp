#include "expert_ffn.h"

#include "activation.h"
#include "group_tiles.h"
#include "ragged_unsort.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Columns of the hidden size per task of the weight gradients. A task sums over all rows of its expert, so that the
// order of sums is fixed. A multiple of the widths of the micro-tiles, and at most the rows that a product works on at
// a time: more would copy its right-hand side twice.
constexpr int64_t kGradientColumns = 256;

// F
template <class T>
int64_t intermediate_size(const ExpertWeights<T>& experts) {
  return experts.down.first.rows;
}

// Columns of the preactivations Z.
template <class T>
int64_t preactivation_width(const ExpertWeights<T>& experts) {
  return experts.gate.first.columns + experts.up.first.columns;
}

// The columns of Z that `up` gives: all but those of a separate gate.
template <class View, class T>
View up_columns(const View& preactivations, const ExpertWeights<T>& experts) {
  return preactivations.column_range(preactivations.columns - experts.up.first.columns, preactivations.columns);
}

template <class View, class T>
View gate_columns(const View& preactivations, const ExpertWeights<T>& experts) {
  return preactivations.column_range(0, experts.gate.first.columns);
}

// Elements of one expert's matrices: multiply-adds per row.
template <class Arguments>
int64_t matrix_elements(const Arguments& a) {
  return a.x.columns * (preactivation_width(a.experts) + intermediate_size(a.experts));
}

template <class T>
void gather_tokens(ConstMatrixView<T> x, const RoutedRows& routed, int64_t first_row, MatrixView<T> tokens) {
  for (int64_t r = 0; r < tokens.rows; ++r) {
    copy_row(x.row(routed.slots[first_row + r] / routed.top_k), tokens.row(r), tokens.columns);
  }
}

// out = a * b + bias
template <class T>
void multiply_add_bias(const Gemm<T>& gemm, ConstMatrixView<T> a, ConstMatrixView<T> b, const T* bias,
                       MatrixView<T> out) {
  for (int64_t r = 0; r < out.rows && bias != nullptr; ++r) copy_row(bias, out.row(r), out.columns);
  gemm.multiply(a, b, out, bias != nullptr);
}

template <class T>
const T* bias_row(ConstMatrixView<T> bias, int64_t group) {
  return bias.data == nullptr ? nullptr : bias.row(group);
}

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

template <class T>
void forward_tile(const ExpertFfn<T>& a, const GroupTile& tile) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t hidden_size = a.x.columns;
  const int64_t width = intermediate_size(experts);

  const MatrixView<T> tokens{scratch<T>(0, height * hidden_size), height, hidden_size, hidden_size};
  const MatrixView<T> activated{scratch<T>(1, height * width), height, width, width};
  MatrixView<T> preactivations;
  if (a.preactivations.data != nullptr) {
    preactivations = a.preactivations.row_range(tile.begin, tile.end);
  } else {
    const int64_t columns = preactivation_width(experts);
    preactivations = {scratch<T>(2, height * columns), height, columns, columns};
  }

  gather_tokens(a.x, a.routed, tile.begin, tokens);
  if (a.kind.gate == GateLayout::separate) {
    multiply_add_bias(*a.gemm, tokens.as_const(), experts.gate[tile.group], bias_row(experts.gate_bias, tile.group),
                      gate_columns(preactivations, experts));
  }
  multiply_add_bias(*a.gemm, tokens.as_const(), experts.up[tile.group], bias_row(experts.up_bias, tile.group),
                    up_columns(preactivations, experts));
  activate_rows(a.kind, preactivations, activated);
  multiply_add_bias(*a.gemm, activated.as_const(), experts.down[tile.group], bias_row(experts.down_bias, tile.group),
                    a.rows.row_range(tile.begin, tile.end));
}

// For one row: Z becomes dZ, A becomes weight * A; returns <dA', A>.
template <class T>
Accumulator<T> activate_backward_row(const ExpertFfnBackward<T>& a, int64_t row, Accumulator<T> weight,
                                     const T* grad_activated) {
  using S = Accumulator<T>;
  const int64_t width = intermediate_size(a.experts);
  T* preactivations = a.preactivations.row(row);
  S grad_weight = 0;
  for (int64_t begin = 0; begin < width; begin += kColumnBlock) {
    const int64_t size = at_most(width - begin, kColumnBlock);
    const auto block = activate_block<T, true>(a.kind, preactivations, width, begin, size);
    const PreactivationColumns columns = preactivation_columns(a.kind.gate, width, begin);
    Block<S> grad = load_block(grad_activated + begin, 1, size);
    grad_weight += (grad * block.activated).sum();
    grad *= weight;
    store_block<T>(grad * block.up_slope, preactivations + columns.up, columns.stride);
    if (a.kind.gate != GateLayout::none) {
      store_block<T>(grad * block.gate_slope, preactivations + columns.gate, columns.stride);
    }
    if (a.activated.data != nullptr) store_block<T>(weight * block.activated, a.activated.row(row) + begin, 1);
  }
  return grad_weight;
}

template <class T>
void backward_tile(const ExpertFfnBackward<T>& a, const GroupTile& tile) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t hidden_size = a.x.columns;
  const int64_t width = intermediate_size(experts);
  const MatrixView<T> grad_out{scratch<T>(0, height * hidden_size), height, hidden_size, hidden_size};
  const MatrixView<T> grad_activated{scratch<T>(1, height * width), height, width, width};

  gather_tokens(a.grad_out, a.routed, tile.begin, grad_out);
  a.gemm->multiply(grad_out.as_const(), experts.down[tile.group].transposed(), grad_activated, false);
  for (int64_t r = 0; r < height; ++r) {
    const int64_t slot = a.routed.slots[tile.begin + r];
    const Accumulator<T> weight = a.weights == nullptr ? Accumulator<T>(1) : a.weights[slot];
    Accumulator<T> grad_weight = activate_backward_row(a, tile.begin + r, weight, grad_activated.row(r));
    if (a.grad_weights == nullptr) continue;
    if (experts.down_bias.data != nullptr) {
      grad_weight += dot_rows<T>(grad_out.row(r), experts.down_bias.row(tile.group), hidden_size);
    }
    a.grad_weights[slot] = grad_weight;
  }
}

template <class T>
void grad_rows_tile(const ExpertFfnBackward<T>& a, const GroupTile& tile) {
  const ExpertWeights<T>& experts = a.experts;
  const ConstMatrixView<T> grad = a.preactivations.row_range(tile.begin, tile.end).as_const();
  const MatrixView<T> grad_rows = a.grad_rows.row_range(tile.begin, tile.end);
  a.gemm->multiply(up_columns(grad, experts), experts.up[tile.group].transposed(), grad_rows, false);
  if (a.kind.gate == GateLayout::separate) {
    a.gemm->multiply(gate_columns(grad, experts), experts.gate[tile.group].transposed(), grad_rows, true);
  }
}

// out = lhs^T * rhs; a product over no rows is zero. A product is written row by row: into a transposed matrix, as
// linear layers have them, the transposed one.
template <class T>
void multiply_transposed(const Gemm<T>& gemm, ConstMatrixView<T> lhs, ConstMatrixView<T> rhs, MatrixView<T> out) {
  if (out.column_stride == 1) return gemm.multiply(lhs.transposed(), rhs, out, false);
  gemm.multiply(rhs.transposed(), lhs, out.transposed(), false);
}

// out = sum of weight_of(r) * rows[r]
template <class T, class Weight>
void sum_rows(ConstMatrixView<T> rows, const Weight& weight_of, T* out) {
  sum_weighted_rows<T>(rows, rows.rows, [](int64_t r) { return r; }, weight_of, out);
}

// The gradients of one expert's matrices in columns [begin, end) of the hidden size.
template <class T>
void weight_gradients(const ExpertFfnBackward<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const int64_t height = rows.end - rows.begin;
  const int64_t columns = end - begin;
  const ConstMatrixView<T> grad = a.preactivations.row_range(rows.begin, rows.end).as_const();

  if (!a.grad_up.empty() || !a.grad_gate.empty()) {
    const MatrixView<T> tokens{scratch<T>(0, height * columns), height, columns, columns};
    gather_tokens(a.x.column_range(begin, end), a.routed, rows.begin, tokens);
    if (!a.grad_up.empty()) {
      multiply_transposed(*a.gemm, tokens.as_const(), up_columns(grad, a.experts),
                          a.grad_up[rows.group].row_range(begin, end));
    }
    if (!a.grad_gate.empty()) {
      multiply_transposed(*a.gemm, tokens.as_const(), gate_columns(grad, a.experts),
                          a.grad_gate[rows.group].row_range(begin, end));
    }
  }
  if (!a.grad_down.empty() || a.grad_down_bias.data != nullptr) {
    const MatrixView<T> grad_out{scratch<T>(0, height * columns), height, columns, columns};
    gather_tokens(a.grad_out.column_range(begin, end), a.routed, rows.begin, grad_out);
    if (!a.grad_down.empty()) {
      multiply_transposed(*a.gemm, a.activated.row_range(rows.begin, rows.end).as_const(), grad_out.as_const(),
                          a.grad_down[rows.group].column_range(begin, end));
    }
    if (a.grad_down_bias.data != nullptr) {
      const auto weight = [&](int64_t r) {
        return a.weights == nullptr ? Accumulator<T>(1) : a.weights[a.routed.slots[rows.begin + r]];
      };
      sum_rows(grad_out.as_const(), weight, a.grad_down_bias.row(rows.group) + begin);
    }
  }
}

template <class T>
void bias_gradients(const ExpertFfnBackward<T>& a, const GroupTile& rows) {
  const ConstMatrixView<T> grad = a.preactivations.row_range(rows.begin, rows.end).as_const();
  const auto one = [](int64_t) { return Accumulator<T>(1); };
  if (a.grad_up_bias.data != nullptr) {
    sum_rows(up_columns(grad, a.experts), one, a.grad_up_bias.row(rows.group));
  }
  if (a.grad_gate_bias.data != nullptr) {
    sum_rows(gate_columns(grad, a.experts), one, a.grad_gate_bias.row(rows.group));
  }
}

template <class T>
void all_weight_gradients(const ExpertFfnBackward<T>& a, const Executor& executor) {
  const bool is_wanted = !a.grad_gate.empty() || !a.grad_up.empty() || !a.grad_down.empty() ||
                         a.grad_gate_bias.data != nullptr || a.grad_up_bias.data != nullptr ||
                         a.grad_down_bias.data != nullptr;
  if (!is_wanted) return;
  const GroupTiles list = make_whole_groups(a.routed.group_sizes, a.routed.num_groups, kWorkListScratch);
  const int64_t hidden_size = a.x.columns;
  // At least one: the biases have gradients whatever the hidden size.
  const int64_t blocks = hidden_size == 0 ? 1 : (hidden_size + kGradientColumns - 1) / kGradientColumns;
  const auto compute = [&](int64_t index) {
    const GroupTile& rows = list.tiles[index / blocks];
    const int64_t begin = index % blocks * kGradientColumns;
    const int64_t end = at_most(begin + kGradientColumns, hidden_size);
    weight_gradients(a, rows, begin, end);
    if (begin == 0) bias_gradients(a, rows);
  };
  // Writing the result counts as one row.
  const int64_t multiply_adds = (list.num_rows + list.count) * matrix_elements(a);
  run_tasks(executor, list.count * blocks, multiply_adds, Task(compute));
}

// Calls body(tile) for all rows.
template <class Arguments, class Body>
void run_tiles(const Arguments& a, const Executor& executor, const Body& body) {
  const GroupTiles list = make_group_tiles(a.routed.group_sizes, a.routed.num_groups, kWorkListScratch);
  const auto compute = [&](int64_t index) { body(list.tiles[index]); };
  run_tasks(executor, list.count, list.num_rows * matrix_elements(a), Task(compute));
}

}  // namespace

template <class T>
void expert_ffn(const ExpertFfn<T>& a, const Executor& executor) {
  run_tiles(a, executor, [&](const GroupTile& tile) { forward_tile(a, tile); });
  ragged_unsort(RaggedUnsort<T>{a.rows.as_const(), a.routed.row_of_slot, a.routed.top_k, a.weights, a.out}, executor);
}

template <class T>
void expert_ffn_backward(const ExpertFfnBackward<T>& a, const Executor& executor) {
  if (!a.continues) {
    run_tiles(a, executor, [&](const GroupTile& tile) { backward_tile(a, tile); });
  }
  if (a.grad_x.data != nullptr) {
    run_tiles(a, executor, [&](const GroupTile& tile) { grad_rows_tile(a, tile); });
    const RaggedUnsort<T> unsort{a.grad_rows.as_const(), a.routed.row_of_slot, a.routed.top_k, nullptr, a.grad_x};
    ragged_unsort(unsort, executor);
  }
  all_weight_gradients(a, executor);
}

MAXMOE_INSTANTIATE(expert_ffn, ExpertFfn)
MAXMOE_INSTANTIATE(expert_ffn_backward, ExpertFfnBackward)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
