// Runs of the fused experts in tests: their variants and shapes, the forward pass, and all kernels of the backward
// pass.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "eigen_products.h"
#include "ffn_factors.h"
#include "kernels/experts/expert_ffn.h"
#include "kernels/experts/tgmm.h"
#include "matrix.h"
#include "naive_ffn.h"
#include "routing.h"

namespace maxmoe {

struct Variant {
  ActivationKind kind;
  bool biased;
  bool weighted;

  bool is_gated() const { return kind.gate != GateLayout::none; }
};

inline std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const ActivationKind& kind : activation_kinds()) all.push_back({kind, all.size() % 3 != 0, all.size() % 4 != 2});
  return all;
}

inline std::vector<FfnShape> shapes() {
  return {{random_routing(0, 2, 3, 1), 5, 7},   {random_routing(1, 1, 1, 1), 1, 1},
          {random_routing(17, 2, 3, 1), 9, 13}, {random_routing(7, 4, 31, 1), 3, 40},
          {all_to_one_routing(11, 4, 2), 8, 5}, {plan_routing(3, 1, 2, {-1, -1, -1}), 4, 4}};
}

template <class Check>
void for_every_case(const Check& check) {
  const std::vector<FfnShape> all = shapes();
  const std::vector<Variant> kinds = variants();
  for (size_t s = 0; s < all.size(); ++s) {
    for (size_t v = 0; v < kinds.size(); ++v) {
      SCOPED_TRACE(testing::Message() << "shape " << s << ", variant " << v);
      check(all[s], kinds[v]);
    }
  }
}

// All matrices with factors of different ranks, in each layout, and one matrix with factors.
inline std::vector<FactorShape> factor_shapes() {
  return {{2, 3, 1, false, false}, {1, 4, 2, true, false}, {3, 1, 2, false, true}, {2, 2, 5, true, true},
          {2, 0, 0, false, false}, {0, 2, 0, false, true}, {0, 0, 3, true, false}};
}

// Calls check(shape, variant, factor_shape) for every variant and for every shape of the factors.
template <class Check>
void for_every_low_rank_case(const Check& check) {
  const std::vector<FactorShape> factors = factor_shapes();
  for_every_case([&](const FfnShape& shape, const Variant& variant) {
    for (size_t f = 0; f < factors.size(); ++f) {
      SCOPED_TRACE(testing::Message() << "factors " << f);
      check(shape, variant, factors[f]);
    }
  });
}

template <class T>
struct FfnForward {
  Matrix<T> preactivations;
  Matrix<T> reduced;  // reduced rows of gate, up and down, side by side; [R, 0] without factors
  Matrix<T> out;
};

template <class T>
ExpertProjections<T> with_factors(ExpertProjections<T> experts, const FfnFactors<T>& factors) {
  experts.gate.factors = factors.gate.view();
  experts.up.factors = factors.up.view();
  experts.down.factors = factors.down.view();
  return experts;
}

template <class T>
FfnForward<T> run_forward(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors,
                          const FfnFactors<T>& factors = {}) {
  const Routing& routing = shape.routing;
  const int64_t width = shape.intermediate_size * (variant.is_gated() ? 2 : 1);
  Matrix<T> preactivations(routing.num_rows(), width);
  Matrix<T> reduced(routing.num_rows(), factors.total_rank());
  ExpertFfn<T> a;
  a.x = tensors.x.view();
  a.weights = variant.weighted ? tensors.weights.view().data : nullptr;
  a.routed = routed_rows(routing);
  const Projections<T> projections(variant.kind.gate, tensors, routing.num_experts);
  a.experts = with_factors(projections.experts(tensors, variant.biased), factors);
  a.kind = variant.kind;
  a.gemm = &test_gemm<T>();
  const auto run = [&](MatrixView<T> out, const Executor& executor) {
    Matrix<T> rows(routing.num_rows(), shape.hidden_size);
    a.rows = rows.view();
    a.out = out;
    expert_ffn(a, executor);
  };
  const Matrix<T> lean = run_kernel<T>(routing.num_tokens, shape.hidden_size, run);
  a.preactivations = preactivations.view();
  a.reduced = factors.split(reduced.view());
  const Matrix<T> out = run_kernel<T>(routing.num_tokens, shape.hidden_size, run);
  EXPECT_TRUE(out.has_same_bits(lean)) << "out depends on whether the intermediates are stored";
  EXPECT_TRUE(preactivations.gap_is_intact() && reduced.gap_is_intact());
  Matrix<T> reduced_alone(routing.num_rows(), factors.total_rank());
  a.reduced = factors.split(reduced_alone.view());
  const auto run_alone = [&](MatrixView<T> again, const Executor& executor) {
    a.preactivations = again;
    a.rows = a.out = {};
    expert_ffn(a, executor);
  };
  const Matrix<T> alone = run_kernel<T>(routing.num_rows(), width, run_alone);
  EXPECT_TRUE(alone.has_same_bits(preactivations)) << "Z depends on whether out is computed";
  EXPECT_TRUE(reduced_alone.has_same_bits(reduced)) << "the reduced rows depend on whether out is computed";
  return {preactivations, reduced, out};
}

template <class T>
struct FfnGradients {
  FfnTensors<T> tensors;
  FfnFactors<T> factors;
};

// The gradients of <grad_out, out>, in the layout of the tensors and factors. Each method calls one kernel, in the
// order of the backward pass.
template <class T>
class FfnBackward {
 public:
  FfnBackward(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors,
              const Matrix<T>& preactivations, const Matrix<T>& grad_out, const Executor& executor,
              const FfnFactors<T>& factors = {}, const Matrix<T>& reduced = {0, 0})
      : shape_(shape),
        variant_(variant),
        tensors_(tensors),
        factors_(factors),
        grad_out_(grad_out),
        executor_(executor),
        projections_(variant.kind.gate, tensors, shape.routing.num_experts),
        experts_(with_factors(projections_.experts(tensors, variant.biased), factors)),
        preactivations_(preactivations),
        reduced_(reduced),
        grad_reduced_(shape.routing.num_rows(), factors.total_rank()),
        weighted_reduced_(shape.routing.num_rows(), factors.down.rank()),
        grads_{FfnTensors<T>(shape), factors} {
    grads_.tensors.weights.fill(0.0);  // the gradient of a slot without a row is not written
    for (FactorPair<T>* pair : {&grads_.factors.gate, &grads_.factors.up, &grads_.factors.down}) {
      pair->a.memory().fill(std::numeric_limits<double>::quiet_NaN());
      pair->b.memory().fill(std::numeric_limits<double>::quiet_NaN());
    }
  }

  FfnGradients<T> run() {
    if (factors_.down.rank() > 0) down_factors();
    down();
    input();
    up();
    if (factors_.gate.rank() > 0) factor_b(rows_of(reduced_).gate, true, grads_.factors.gate);
    if (factors_.up.rank() > 0) factor_b(rows_of(reduced_).up, false, grads_.factors.up);
    return grads_;
  }

  // The arguments of the backward pass through down, without the gradients.
  ExpertFfnBackwardDown<T> down_arguments() {
    ExpertFfnBackwardDown<T> a{call()};
    a.grad_out = grad_out_.view();
    a.grad_reduced = rows_of(grad_reduced_).down.as_const();
    a.weighted_reduced = weighted_reduced_.view().as_const();
    a.preactivations = preactivations_.view();
    return a;
  }

  const Matrix<T>& preactivations() const { return preactivations_; }

 private:
  ExpertFfnCall<T> call() const {
    return {tensors_.x.view(),
            variant_.weighted ? tensors_.weights.view().data : nullptr,
            routed_rows(shape_.routing),
            experts_,
            variant_.kind,
            &test_gemm<T>()};
  }
  ReducedRows<T> rows_of(Matrix<T>& rows) const { return factors_.split(rows.view()); }
  int64_t gate_width() const { return experts_.gate.columns(); }

  void down_factors() {
    ExpertFfnBackwardDownFactors<T> a{call()};
    a.grad_out = grad_out_.view();
    a.preactivations = preactivations_.view().as_const();
    a.reduced = rows_of(reduced_).down.as_const();
    a.grad_reduced = rows_of(grad_reduced_).down;
    a.weighted_reduced = weighted_reduced_.view();
    a.grad_a = grads_.factors.down.a.view();
    expert_ffn_backward_down_factors(a, executor_);
  }

  void down() {
    Matrix<T> activated(shape_.routing.num_rows(), shape_.intermediate_size);
    ExpertFfnBackwardDown<T> a = down_arguments();
    a.activated = activated.view();
    if (variant_.weighted) a.grad_weights = grads_.tensors.weights.view().data;
    a.grad_down = stack(grads_.tensors.down, shape_.routing.num_experts);
    if (factors_.down.rank() > 0) a.grad_b = grads_.factors.down.b.view();
    if (variant_.biased) a.grad_bias = grads_.tensors.down_bias.view();
    expert_ffn_backward_down(a, executor_);
  }

  void input() {
    Matrix<T> grad_rows(shape_.routing.num_rows(), shape_.hidden_size);
    ExpertFfnBackwardInput<T> a{call()};
    a.grad_preactivations = preactivations_.view().as_const();
    a.rows = grad_rows.view();
    a.grad_reduced = rows_of(grad_reduced_);
    a.grad_x = grads_.tensors.x.view();
    expert_ffn_backward_input(a, executor_);
  }

  void up() {
    Projections<T> grad_projections(variant_.kind.gate, grads_.tensors, shape_.routing.num_experts);
    ExpertFfnBackwardUp<T> a{call()};
    a.grad_preactivations = preactivations_.view().as_const();
    a.gate.reduced = rows_of(grad_reduced_).gate.as_const();
    a.up.reduced = rows_of(grad_reduced_).up.as_const();
    if (factors_.gate.rank() > 0) a.gate.a = grads_.factors.gate.a.view();
    if (factors_.up.rank() > 0) a.up.a = grads_.factors.up.a.view();
    grad_projections.collect_into(a, variant_.biased);
    expert_ffn_backward_up(a, executor_);
    grad_projections.copy_to(grads_.tensors);
  }

  // The gradient of `b` of gate or up: the reduced rows, transposed, times dZ.
  void factor_b(MatrixView<T> reduced, bool is_gate, FactorPair<T>& grads) {
    const RoutedRows routed = routed_rows(shape_.routing);
    const ConstMatrixView<T> all = preactivations_.view().as_const();
    const ConstMatrixView<T> grad =
        is_gate ? columns_of(all, 0, gate_width()) : columns_of(all, gate_width(), all.columns);
    const MatrixStack<T> out = grads.b.view();
    Tgmm<T> a{reduced.as_const(), grad, routed.group_sizes, routed.num_groups, 0, &test_gemm<T>(), out};
    if (out.first.column_stride != 1) {
      std::swap(a.lhs, a.rhs);
      a.out.first = out.first.transposed();
    }
    tgmm(a, executor_);
  }

  const FfnShape& shape_;
  const Variant& variant_;
  const FfnTensors<T>& tensors_;
  FfnFactors<T> factors_;
  const Matrix<T>& grad_out_;
  const Executor& executor_;
  Projections<T> projections_;
  ExpertProjections<T> experts_;
  Matrix<T> preactivations_;  // Z, overwritten with dZ
  Matrix<T> reduced_;
  Matrix<T> grad_reduced_;
  Matrix<T> weighted_reduced_;
  FfnGradients<T> grads_;
};

}  // namespace maxmoe
