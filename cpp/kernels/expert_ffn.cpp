#include "expert_ffn.h"

#include "activation.h"
#include "group_tiles.h"
#include "ragged_unsort.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

enum ScratchSlot : int { kActivatedScratch = 1, kPreactivationsScratch };  // A or dA of a tile, Z of a tile

// F, the rows of the matrices of down.
template <class T>
int64_t intermediate_size(const ExpertWeights<T>& experts) {
  return experts.down.first.rows;
}

// Columns of the preactivations Z.
template <class T>
int64_t preactivation_width(const ExpertWeights<T>& experts) {
  return experts.gate.first.columns + experts.up.first.columns;
}

// The columns of Z, or dZ, of a separate gate, and those of up.
template <class View>
View gate_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(0, gate_width);
}

template <class View>
View up_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(gate_width, preactivations.columns);
}

// The tokens of rows [begin, end): products read them where they are.
template <class T>
GemmOperand<T> tokens_of(ConstMatrixView<T> x, const RoutedRows& routed, int64_t begin, int64_t end) {
  return {x, routed.slots + begin, routed.top_k, end - begin};
}

// The product out = a * b + bias, for some a: out holds the bias already.
template <class T>
Product<T> product_with_bias(ConstMatrixView<T> b, const T* bias, MatrixView<T> out, ConstMatrixView<T> next_b) {
  for (int64_t r = 0; r < out.rows && bias != nullptr; ++r) copy_row(bias, out.row(r), out.columns);
  return {b, out, bias != nullptr, next_b};
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
bool wants_only_preactivations(const ExpertFfn<T>& a) {
  return a.out.data == nullptr;
}

// next_group: what this thread is likely to compute next.
template <class T>
void forward_tile(const ExpertFfn<T>& a, const GroupTile& tile, int64_t next_group) {
  const ExpertWeights<T>& experts = a.experts;
  const int64_t height = tile.end - tile.begin;
  const int64_t width = intermediate_size(experts);

  const GemmOperand<T> tokens = tokens_of(a.x, a.routed, tile.begin, tile.end);
  const MatrixView<T> activated{scratch<T>(kActivatedScratch, height * width), height, width, width};
  const int64_t columns = preactivation_width(experts);
  const MatrixView<T> preactivations =
      a.preactivations.data != nullptr
          ? a.preactivations.row_range(tile.begin, tile.end)
          : MatrixView<T>{scratch<T>(kPreactivationsScratch, height * columns), height, columns, columns};

  const int64_t gate_width = experts.gate.first.columns;
  const ConstMatrixView<T> up = experts.up[tile.group];
  const ConstMatrixView<T> down = experts.down[tile.group];
  const ConstMatrixView<T> of_next_tile = experts.gate.empty() ? experts.up[next_group] : experts.gate[next_group];
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

// For one row: Z becomes dZ, A becomes weight * A; returns <dA, A>.
template <class T>
Accumulator<T> activate_backward_row(const ExpertFfnBackwardDown<T>& a, int64_t row, Accumulator<T> weight,
                                     const T* grad_activated) {
  using S = Accumulator<T>;
  const int64_t width = a.down.first.rows;
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
Accumulator<T> weight_of_slot(const ExpertFfnBackwardDown<T>& a, int64_t slot) {
  return a.weights == nullptr ? Accumulator<T>(1) : a.weights[slot];
}

template <class T>
void grad_preactivations_tile(const ExpertFfnBackwardDown<T>& a, const GroupTile& tile, int64_t next_group) {
  const int64_t height = tile.end - tile.begin;
  const int64_t width = a.down.first.rows;
  const GemmOperand<T> grad_out = tokens_of(a.grad_out, a.routed, tile.begin, tile.end);
  const MatrixView<T> grad_activated{scratch<T>(kActivatedScratch, height * width), height, width, width};

  a.gemm->multiply(grad_out, {a.down[tile.group].transposed(), grad_activated, false, a.down[next_group].transposed()});
  for (int64_t r = 0; r < height; ++r) {
    const int64_t slot = a.routed.slots[tile.begin + r];
    Accumulator<T> grad_weight =
        activate_backward_row(a, tile.begin + r, weight_of_slot(a, slot), grad_activated.row(r));
    if (a.grad_weights == nullptr) continue;
    if (a.down_bias.data != nullptr) {
      grad_weight += dot_rows<T>(grad_out.memory_row(r), a.down_bias.row(tile.group), a.grad_out.columns);
    }
    a.grad_weights[slot] = grad_weight;
  }
}

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

// out = lhs^T * rhs; a product over no rows is zero. A product is written row by row: into a transposed matrix, as
// linear layers have them, the transposed one.
template <class T>
void multiply_transposed(const Gemm<T>& gemm, GemmOperand<T> lhs, GemmOperand<T> rhs, MatrixView<T> out) {
  if (out.column_stride == 1) return gemm.multiply(lhs.transposed(), {rhs, out, false});
  gemm.multiply(rhs.transposed(), {lhs, out.transposed(), false});
}

// The gradients of down and its bias for one expert, in columns [begin, end) of the hidden size.
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

// The gradients of gate and up for one expert, in rows [begin, end) of the hidden size.
template <class T>
void grad_up_rows(const ExpertFfnBackwardUp<T>& a, const GroupTile& rows, int64_t begin, int64_t end) {
  const ConstMatrixView<T> grad = a.grad_preactivations.row_range(rows.begin, rows.end);
  const GemmOperand<T> tokens = tokens_of(a.x.column_range(begin, end), a.routed, rows.begin, rows.end);
  Product<T> products[2];
  int64_t count = 0;
  const auto add = [&](const MatrixStack<T>& gradient, ConstMatrixView<T> rhs) {
    if (gradient.empty()) return;
    const MatrixView<T> out = gradient[rows.group].row_range(begin, end);
    if (out.column_stride != 1) return multiply_transposed<T>(*a.gemm, tokens, rhs, out);
    products[count++] = {rhs, out, false};
  };
  add(a.grad_gate, gate_columns(grad, a.gate_width));
  add(a.grad_up, up_columns(grad, a.gate_width));
  if (count > 0) a.gemm->multiply(tokens.transposed(), products, count);
}

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

// Calls body(rows, begin, end) for the rows of every expert and columns [begin, end) of the hidden size. Writing the
// result counts as one row of `row_multiply_adds`.
template <class Arguments, class Body>
void run_experts(const Arguments& a, int64_t hidden_size, int64_t row_multiply_adds, const Executor& executor,
                 const Body& body) {
  const GroupTiles list = make_whole_groups(a.routed.group_sizes, a.routed.num_groups, kWorkListScratch);
  const int64_t size = rows_per_gradient_task(list, hidden_size, threads_to_cut_for(*a.gemm, executor));
  // At least one: the biases have gradients whatever the hidden size.
  const int64_t blocks = hidden_size == 0 ? 1 : (hidden_size + size - 1) / size;
  const auto compute = [&](int64_t index) {
    const int64_t begin = index % blocks * size;
    body(list.tiles[index / blocks], begin, at_most(begin + size, hidden_size));
  };
  run_tasks(executor, list.count * blocks, (list.num_rows + list.count) * row_multiply_adds, Task(compute));
}

// Calls body(tile, next_group) for all rows, with the group of the tile that the thread will probably take next.
// `depth` is the largest inner dimension of its products.
template <class Arguments, class Body>
void run_tiles(const Arguments& a, int64_t num_rows, int64_t depth, int64_t row_multiply_adds, const Executor& executor,
               const Body& body) {
  const int64_t max_rows = tile_rows(num_rows, depth, threads_to_cut_for(*a.gemm, executor));
  const GroupTiles list = make_group_tiles(a.routed.group_sizes, a.routed.num_groups, max_rows, kWorkListScratch);
  const int64_t num_threads = executor.num_threads();
  const auto compute = [&](int64_t index) {
    body(list.tiles[index], list.tiles[at_most(index + num_threads, list.count - 1)].group);
  };
  run_tasks(executor, list.count, list.num_rows * row_multiply_adds, Task(compute));
}

}  // namespace

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
    if (begin == 0) grad_up_biases(a, rows);
  });
}

MAXMOE_INSTANTIATE(expert_ffn, ExpertFfn)
MAXMOE_INSTANTIATE(expert_ffn_backward_down, ExpertFfnBackwardDown)
MAXMOE_INSTANTIATE(expert_ffn_backward_input, ExpertFfnBackwardInput)
MAXMOE_INSTANTIATE(expert_ffn_backward_up, ExpertFfnBackwardUp)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
