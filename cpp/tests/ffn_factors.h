// Low-rank factors beside the matrices of the experts, and the float64 tensors that they stand for.
#pragma once

#include <array>
#include <cmath>

#include "kernels/experts/expert_ffn.h"
#include "matrix.h"
#include "naive_ffn.h"

namespace maxmoe {

// Matrices [rows, columns], one per expert, each stored row-major or transposed.
template <class T>
class Factor {
 public:
  Factor() = default;
  Factor(int64_t count, int64_t rows, int64_t columns, bool is_transposed)
      : count_(count),
        rows_(rows),
        is_transposed_(is_transposed),
        memory_(count * (is_transposed ? columns : rows), is_transposed ? rows : columns) {}

  MatrixStack<T> view() { return in_layout(stack(memory_, count_)); }
  ConstMatrixStack<T> view() const { return in_layout(stack(memory_, count_)); }
  T& element(int64_t expert, int64_t r, int64_t c) {
    const MatrixView<T> matrix = view()[expert];
    return matrix.data[r * matrix.row_stride + c * matrix.column_stride];
  }
  double operator()(int64_t expert, int64_t r, int64_t c) const {
    const ConstMatrixView<T> matrix = view()[expert];
    return widen(matrix.data[r * matrix.row_stride + c * matrix.column_stride]);
  }
  Matrix<T>& memory() { return memory_; }
  const Matrix<T>& memory() const { return memory_; }
  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return is_transposed_ ? memory_.rows() / count_ : memory_.columns(); }

 private:
  template <class Stack>
  Stack in_layout(Stack stack) const {
    if (is_transposed_) stack.first = stack.first.transposed();
    return stack;
  }

  int64_t count_ = 0;
  int64_t rows_ = 0;
  bool is_transposed_ = false;
  Matrix<T> memory_{0, 0};
};

// The factors of one stack of matrices, or their gradients.
template <class T>
struct FactorPair {
  Factor<T> a, b;  // [in, r] and [r, out]

  int64_t rank() const { return a.memory().columns() == 0 ? 0 : b.rows(); }
  LowRankFactors<T> view() const { return rank() == 0 ? LowRankFactors<T>{} : LowRankFactors<T>{a.view(), b.view()}; }
};

// Ranks of the factors of gate, up and down, 0 without factors, and the layout of their memory.
struct FactorShape {
  int64_t gate, up, down;
  bool is_a_transposed;
  bool is_b_transposed;
};

// Columns [begin, end) of a view. Without rows, the view has no memory, and its address stays null.
template <class View>
View columns_of(View view, int64_t begin, int64_t end) {
  if (view.rows > 0) return view.column_range(begin, end);
  view.columns = end - begin;
  return view;
}

// The factors of gate, up and down as the kernels get them. A fused gate has the factors of `up`.
template <class T>
struct FfnFactors {
  FfnFactors() = default;
  FfnFactors(const FfnShape& s, GateLayout layout, const FactorShape& f) {
    const int64_t up_width =
        s.intermediate_size * (layout == GateLayout::separate || layout == GateLayout::none ? 1 : 2);
    const auto pair = [&](int64_t in, int64_t rank, int64_t out) {
      const int64_t count = s.routing.num_experts;
      return FactorPair<T>{{count, in, rank, f.is_a_transposed}, {count, rank, out, f.is_b_transposed}};
    };
    if (layout == GateLayout::separate && f.gate > 0) gate = pair(s.hidden_size, f.gate, s.intermediate_size);
    if (f.up > 0) up = pair(s.hidden_size, f.up, up_width);
    if (f.down > 0) down = pair(s.intermediate_size, f.down, s.hidden_size);
  }

  // Random factors. The product of a token of size 1 with `a` is of size 1.
  static FfnFactors random(const FfnShape& s, GateLayout layout, const FactorShape& f, unsigned seed) {
    FfnFactors factors(s, layout, f);
    for (FactorPair<T>* pair : {&factors.gate, &factors.up, &factors.down}) {
      if (pair->rank() == 0) continue;
      pair->a.memory().randomize(seed++, std::sqrt(3.0 / static_cast<double>(pair->a.rows())));
      pair->b.memory().randomize(seed++);
    }
    return factors;
  }

  int64_t total_rank() const { return gate.rank() + up.rank() + down.rank(); }

  // The reduced rows of gate, up and down, side by side in a matrix [R, total rank].
  ReducedRows<T> split(MatrixView<T> rows) const {
    const int64_t after_gate = gate.rank();
    const int64_t after_up = after_gate + up.rank();
    return {columns_of(rows, 0, after_gate), columns_of(rows, after_gate, after_up),
            columns_of(rows, after_up, rows.columns)};
  }

  FactorPair<T> gate, up, down;
};

// Calls visit(matrix, pair, column) for the matrices of `tensors` that have factors, with a pointer to the member of
// FfnFactors. Column f of the matrix is column(f) of the product of the factors.
template <class Factors, class Visit>
void for_every_factor_pair(GateLayout layout, FfnTensors<double>& tensors, const Factors& factors, const Visit& visit) {
  const int64_t width = tensors.up.columns();
  const bool is_fused = layout == GateLayout::concatenated || layout == GateLayout::interleaved;
  const auto same = [](int64_t f) { return f; };
  const auto gate_column = [=](int64_t f) { return fused_column(layout, width, false, f); };
  const auto up_column = [=](int64_t f) { return is_fused ? fused_column(layout, width, true, f) : f; };
  if (factors.gate.rank() > 0) visit(tensors.gate, [](auto& f) -> auto& { return f.gate; }, same);
  if (factors.up.rank() > 0 && is_fused) visit(tensors.gate, [](auto& f) -> auto& { return f.up; }, gate_column);
  if (factors.up.rank() > 0) visit(tensors.up, [](auto& f) -> auto& { return f.up; }, up_column);
  if (factors.down.rank() > 0) visit(tensors.down, [](auto& f) -> auto& { return f.down; }, same);
}

// The tensors with W + a * b in the place of each matrix W that has factors.
template <class T>
FfnTensors<double> merged(GateLayout layout, const FfnTensors<T>& tensors, const FfnFactors<T>& factors) {
  FfnTensors<double> sums(tensors);
  for_every_factor_pair(layout, sums, factors, [&](Matrix<double>& matrix, const auto& pair_of, const auto& column) {
    const FactorPair<T>& pair = pair_of(factors);
    const int64_t in = pair.a.rows();
    for (int64_t r = 0; r < matrix.rows(); ++r) {
      for (int64_t f = 0; f < matrix.columns(); ++f) {
        for (int64_t k = 0; k < pair.rank(); ++k) {
          matrix.element(r, f) += pair.a(r / in, r % in, k) * pair.b(r / in, k, column(f));
        }
      }
    }
  });
  return sums;
}

// The gradients of the factors by the chain rule, where `grads` are the gradients of the merged matrices W:
// da = dW b^T, db = a^T dW.
template <class T>
FfnFactors<double> factor_gradients(const FfnShape& shape, GateLayout layout, FfnTensors<double> grads,
                                    const FfnFactors<T>& factors) {
  FfnFactors<double> results(shape, layout,
                             {factors.gate.rank(), factors.up.rank(), factors.down.rank(), false, false});
  for (FactorPair<double>* pair : {&results.gate, &results.up, &results.down}) {
    pair->a.memory().fill(0.0);
    pair->b.memory().fill(0.0);
  }
  for_every_factor_pair(layout, grads, factors, [&](Matrix<double>& matrix, const auto& pair_of, const auto& column) {
    const FactorPair<T>& pair = pair_of(factors);
    FactorPair<double>& result = pair_of(results);
    const int64_t in = pair.a.rows();
    for (int64_t r = 0; r < matrix.rows(); ++r) {
      for (int64_t f = 0; f < matrix.columns(); ++f) {
        for (int64_t k = 0; k < pair.rank(); ++k) {
          result.a.element(r / in, r % in, k) += matrix(r, f) * pair.b(r / in, k, column(f));
          result.b.element(r / in, k, column(f)) += pair.a(r / in, r % in, k) * matrix(r, f);
        }
      }
    }
  });
  return results;
}

}  // namespace maxmoe
