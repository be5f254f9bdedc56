#include "ops/backend.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "kernels/matrix/dtype.h"
#include "kernels/product/tiled/tile_gemm.h"
#include "kernels/quantized/dequantize.h"
#include "ops/cuda_kernels.h"
#include "ops/torch_internals.h"

namespace maxmoe::ops {
namespace {

std::atomic<Path> forced{Path::kernels};

class TorchExecutor final : public Executor {
 public:
  int64_t num_threads() const override { return at::get_num_threads(); }

  void run(int64_t count, const Task& task) const override {
    if (count <= 0) return;
    // Each thread takes the next task when it is free, because tasks differ in size.
    std::atomic<int64_t> next{0};
    // One call per thread even for a single task: inside a parallel region every library computes on the calling
    // thread alone, so that the result does not depend on the number of threads.
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      for (int64_t index = next++; index < count; index = next++) task(index);
    });
  }
};

template <class T>
constexpr at::ScalarType kType = std::is_same_v<T, BFloat16> ? at::kBFloat16 : at::kHalf;

// The product of the BLAS that torch was built with: MKL or oneDNN on x86.
template <class T>
class TorchGemm final : public Gemm<T> {
 public:
  bool bits_depend_on_tiles() const override { return true; }

  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    if (a.rows() == 0) return;
    // The threads of the executor do not inherit the guards of the thread that runs the operator.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::Tensor left = tensor(left_in_memory(a));
    for (int64_t i = 0; i < count; ++i) {
      const Product<T>& product = products[i];
      if (product.c.columns == 0) continue;
      const at::Tensor right = tensor(in_memory(product.b, kPackedBScratch));
      at::Tensor out = tensor(product.c.as_const());
      // The low-rank term comes first, because `out` is rounded after each product and the term is the smaller one.
      if (product.has_low_rank_term()) {
        add_product(out, tensor(with_zeros_behind_rows(product.reduced, kPackedReducedScratch)), tensor(product.expand),
                    product.accumulate);
      }
      add_product(out, left, right, product.accumulate || product.has_low_rank_term());
    }
  }

 private:
  static void add_product(at::Tensor& out, const at::Tensor& left, const at::Tensor& right, bool accumulate) {
    if (accumulate) {
      at::addmm_out(out, out, left, right);
    } else {
      at::mm_out(out, left, right);
    }
  }

  // The matrix of an operand. BLAS reads neither rows by index nor codes: indexed rows are copied to scratch memory,
  // and quantized matrices are dequantized there, one at a time.
  static ConstMatrixView<T> in_memory(const GemmOperand<T>& operand, int scratch_slot) {
    ConstMatrixView<T> matrix = operand.memory;
    if (operand.is_quantized()) {
      T* const elements = scratch<T>(scratch_slot, matrix.rows * matrix.columns);
      maxmoe::dequantize(Dequantize<T>{{operand.quantized, false, 1, 0, 0}, elements}, SerialExecutor());
      matrix = {elements, matrix.rows, matrix.columns, matrix.columns};
    } else if (operand.index != nullptr) {
      T* const rows = scratch<T>(scratch_slot, matrix.rows * matrix.columns);
      for (int64_t r = 0; r < matrix.rows; ++r) {
        std::copy_n(operand.memory_row(r), matrix.columns, rows + r * matrix.columns);
      }
      matrix = {rows, matrix.rows, matrix.columns, matrix.columns};
    }
    return operand.is_transposed ? matrix.transposed() : matrix;
  }

  static ConstMatrixView<T> left_in_memory(const GemmOperand<T>& a) {
    if (a.is_transposed || a.memory.columns % kDepthOfTile == 0) return in_memory(a, kPackedAScratch);
    return with_zeros_behind_rows(a.memory, kPackedAScratch, [&](int64_t r) { return a.memory_row(r); });
  }

  // On matrix units torch reads rows of the left-hand side up to the next multiple of kDepthOfTile elements, and
  // multiplies what stands there by zero: a NaN behind a row would become part of the result.
  template <class RowOf>
  static ConstMatrixView<T> with_zeros_behind_rows(ConstMatrixView<T> matrix, int scratch_slot, const RowOf& row_of) {
    const int64_t stride = (matrix.columns + kDepthOfTile - 1) / kDepthOfTile * kDepthOfTile;
    T* const rows = scratch<T>(scratch_slot, matrix.rows * stride);
    std::fill_n(rows, matrix.rows * stride, T{});
    for (int64_t r = 0; r < matrix.rows; ++r) std::copy_n(row_of(r), matrix.columns, rows + r * stride);
    return {rows, matrix.rows, matrix.columns, stride};
  }
  static ConstMatrixView<T> with_zeros_behind_rows(ConstMatrixView<T> matrix, int scratch_slot) {
    if (matrix.columns % kDepthOfTile == 0) return matrix;
    return with_zeros_behind_rows(matrix, scratch_slot, [&](int64_t r) { return matrix.row(r); });
  }

  static constexpr int64_t kDepthOfTile = 32;

  static at::Tensor tensor(ConstMatrixView<T> m) {
    return at::from_blob(const_cast<T*>(m.data), {m.rows, m.columns}, {m.row_stride, m.column_stride},
                         at::TensorOptions(kType<T>));
  }
};

}  // namespace

Path path_of(const at::Tensor& tensor) {
  const Path path = forced.load(std::memory_order_relaxed);
  if (tensor.is_cpu() || path == Path::aten) return path;
  return tensor.is_cuda() && has_cuda_kernels() ? Path::cuda_kernels : Path::aten;
}

std::string force_path(const std::string& name) {
  static constexpr std::array<const char*, 3> kNames = {"kernels", "cuda_emulator", "aten"};  // in the order of Path
  const auto position = std::find(kNames.begin(), kNames.end(), name) - kNames.begin();
  TORCH_CHECK_VALUE(position < 3, "the path must be kernels, cuda_emulator or aten, got ", name);
  const Path path{static_cast<int>(position)};
  if (path == Path::cuda_kernels) open_cuda_emulator();
  return kNames[static_cast<size_t>(forced.exchange(path))];
}

const Executor& torch_executor() {
  static const TorchExecutor executor;
  return executor;
}

// Torch's product of 16-bit numbers if it runs on matrix units (AMX), which are several times as fast as vector units;
// otherwise ours.
template <class T>
const Gemm<T>& best_gemm() {
  static const KernelGemm<T> own;
  if constexpr (sizeof(T) == 2) {
    static const TorchGemm<T> torchs;
    static const bool has_matrix_units = active_isa() >= Isa::avx512 && torch_internals::has_matrix_units(kType<T>);
    if (has_matrix_units) return torchs;
  }
  return own;
}

template const Gemm<double>& best_gemm<double>();
template const Gemm<float>& best_gemm<float>();
template const Gemm<BFloat16>& best_gemm<BFloat16>();
template const Gemm<Float16>& best_gemm<Float16>();

}  // namespace maxmoe::ops
