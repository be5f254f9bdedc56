// The CUDA kernels: one function per operator, with the arguments of the CPU kernel of the same name where these fit.
//
// All pointers are to memory of the current device. A function starts its kernels on `stream` and returns; no function
// waits for the device or allocates memory. Sums are computed in a fixed order, without atomics, so that results are
// bitwise repeatable. Values that only the device can check (indices, sizes of groups) are assertions of the device,
// with a message that names operator and argument. Throws std::runtime_error if a kernel cannot be started.
#pragma once

#include "kernels/experts/activation.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"
#include "kernels/routing/route.h"
#include "kernels/rows/ragged_dot.h"
#include "kernels/rows/ragged_gather.h"
#include "kernels/rows/ragged_gather_reduce.h"
#include "kernels/rows/ragged_scatter_add.h"

namespace maxmoe::cuda {

using Stream = void*;  // cudaStream_t

// Assigns rows to the slots (t * K + k) of local experts, ordered by expert, then by slot; at most max_rows of them.
// The rows from the last one up to num_rows belong to no slot: their slot is -1. Unlike the CPU kernel it is one call,
// because the number of rows is computed on the device.
struct RaggedPlan {
  const int64_t* experts;  // [T * K], each in [-1, num_experts); -1 is a slot without an expert
  int64_t num_slots;       // T * K
  int64_t num_experts;
  int64_t first_expert;
  int64_t num_local_experts;  // L
  int64_t max_rows;           // negative: no limit
  int64_t num_rows;           // R, at least the number of rows
  int64_t* scratch;           // [ragged_plan_scratch(T * K, L)]
  int64_t* first_rows;        // [L + 1], first row of each expert without a limit; then the number of rows
  int64_t* slots;             // [R]
  int64_t* rows;              // [T * K], row of each slot or -1; or null: not computed
  int64_t* group_sizes;       // [L]
  int64_t* dropped;           // [1], number of local slots past max_rows
};

int64_t ragged_plan_scratch(int64_t num_slots, int64_t num_local_experts);
void ragged_plan(const RaggedPlan& plan, Stream stream);

// Assertions of the values of a plan that comes from elsewhere, in one launch. Lists may be empty.
struct PlanValues {
  int64_t num_slots;     // T * K
  int64_t num_rows;      // R
  const int64_t* slots;  // each in [-1, T * K)
  int64_t slots_size;
  const int64_t* rows;  // each in [-1, R)
  int64_t rows_size;
  const int64_t* group_sizes;  // not negative, and at most R in total
  int64_t num_groups;
};
void check_plan(const PlanValues& plan, Stream stream);

// The scores of a token are in shared memory, which limits the number of experts: 12000 in float64, 24000 in float32.
// Throws std::runtime_error beyond.
template <class T>
void route(const Route<T>& arguments, Stream stream);
template <class T>
void route_backward(const RouteBackward<T>& arguments, Stream stream);

template <class T>
void ragged_gather(const RaggedGather<T>& arguments, Stream stream);
template <class T>
void ragged_gather_reduce(const RaggedGatherReduce<T>& arguments, Stream stream);
// ragged_gather_reduce of the sum of two matrices: adds rows[index[j]] and others[index[j]].
template <class T>
struct RaggedGatherReduceOfTwo {
  RaggedGatherReduce<T> sums;
  ConstMatrixView<T> others;  // [R, D], as sums.rows
};
template <class T>
void ragged_gather_reduce_of_two(const RaggedGatherReduceOfTwo<T>& arguments, Stream stream);
template <class T>
void ragged_dot(const RaggedDot<T>& arguments, Stream stream);

// The slots are ordered by their row first, so that one thread computes each sum.
int64_t ragged_scatter_add_scratch(int64_t index_size, int64_t num_rows);
template <class T>
void ragged_scatter_add(const RaggedScatterAdd<T>& arguments, Stream stream);

// out = f(gate) * up, or f(up) without a gate. Interleaved gate and up are views with a column stride of 2.
template <class T>
struct ActivateRows {
  ActivationKind kind;      // its layout only says whether there is a gate
  ConstMatrixView<T> gate;  // [R, F]
  ConstMatrixView<T> up;    // [R, F]
  MatrixView<T> out;        // [R, F]
};

// The backward pass of activation and weights in one pass over the rows, given grad, the gradient of weights[r] *
// out[r] divided by weights[r]: gate and up are replaced by their gradients, times the weight of the row; `activated`
// is weights[r] * out[r], and may be in the memory of grad; grad_weights[r] = <grad[r], out[r]>.
template <class T>
struct ActivateRowsBackward {
  ActivationKind kind;
  ConstMatrixView<T> grad;        // [R, F]
  const Accumulator<T>* weights;  // [R] or null for ones
  MatrixView<T> gate;             // [R, F]
  MatrixView<T> up;               // [R, F]
  MatrixView<T> activated;        // [R, F], or empty: not computed
  Accumulator<T>* grad_weights;   // [R] or null: not computed
};

template <class T>
void activate_rows(const ActivateRows<T>& arguments, Stream stream);
template <class T>
void activate_rows_backward(const ActivateRowsBackward<T>& arguments, Stream stream);

// out[r] = lhs[index[r]] * rhs[g - group_offset] + bias[g - group_offset] for the rows r of group g. Rows of groups
// outside of [group_offset, group_offset + L) and rows past the last group are zero. float32 products are not TF32.
template <class T>
struct Gmm {
  ConstMatrixView<T> lhs;      // [N, D]
  const int64_t* index;        // [R], each in [-1, N), -1 is a row of zeros; or null: row r of lhs
  ConstMatrixStack<T> rhs;     // [L, D, F], row-major or transposed
  ConstMatrixView<T> bias;     // [L, F] or empty
  const int64_t* group_sizes;  // [G], sum <= R
  int64_t num_groups;          // G
  int64_t group_offset;
  MatrixView<T> out;  // [R, F]
};

template <class T>
void gmm(const Gmm<T>& arguments, Stream stream);

// out[l] = lhs_g^T * rhs_g over the rows of group g = l + group_offset; zero for a group without rows. A block sums all
// rows of its part of a matrix, in order.
template <class T>
struct Tgmm {
  ConstMatrixView<T> lhs;      // [R, D]
  ConstMatrixView<T> rhs;      // [R, F]
  const int64_t* group_sizes;  // [G], sum <= R
  int64_t num_groups;          // G
  int64_t group_offset;
  MatrixStack<T> out;  // [L, D, F], row-major
};

template <class T>
void tgmm(const Tgmm<T>& arguments, Stream stream);

}  // namespace maxmoe::cuda

// Explicit instantiations for the four types. The kernels are defined in .cu files.
#define MAXMOE_INSTANTIATE_CUDA(name, Arguments)                    \
  template void name<double>(const Arguments<double>&, Stream);     \
  template void name<float>(const Arguments<float>&, Stream);       \
  template void name<BFloat16>(const Arguments<BFloat16>&, Stream); \
  template void name<Float16>(const Arguments<Float16>&, Stream);
