#include "ops/backend.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <set>
#include <sstream>

#include "kernels/product/tiled/tile_gemm.h"
#include "ops/cuda_kernels.h"

namespace maxmoe::ops {
namespace {

std::atomic<Path> forced{Path::kernels};

// The kernels of MAXMOE_CUDA_KERNELS.
std::set<std::string, std::less<>> enabled_cuda_kernels() {
  static const std::set<std::string, std::less<>> all = {"activate_rows",
                                                         "activate_rows_backward",
                                                         "check_plan",
                                                         "gmm",
                                                         "ragged_dot",
                                                         "ragged_gather",
                                                         "ragged_gather_reduce",
                                                         "ragged_plan",
                                                         "ragged_scatter_add",
                                                         "route",
                                                         "tgmm"};
  const char* const variable = std::getenv("MAXMOE_CUDA_KERNELS");
  std::set<std::string, std::less<>> enabled;
  std::istringstream words(variable != nullptr ? variable : "all");
  for (std::string word; std::getline(words, word, ',');) {
    const bool is_removed = word.starts_with('-');
    const std::string name = is_removed ? word.substr(1) : word;
    TORCH_CHECK_VALUE(all.contains(name) || word == "all" || word == "none",
                      "MAXMOE_CUDA_KERNELS must be a list of all, none, kernels and -kernels, got ", word);
    if (word == "all") enabled = all;
    if (word == "none") enabled.clear();
    if (is_removed) enabled.erase(name);
    if (!is_removed && all.contains(name)) enabled.insert(name);
  }
  return enabled;
}

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

}  // namespace

Path path_of(const at::Tensor& tensor) {
  const Path path = forced.load(std::memory_order_relaxed);
  if (tensor.is_cpu() || path == Path::aten) return path;
  return tensor.is_cuda() && has_cuda_kernels() ? Path::cuda_kernels : Path::aten;
}

Path path_of(const at::Tensor& tensor, const char* kernel) {
  static const std::set<std::string, std::less<>> enabled = enabled_cuda_kernels();
  const Path path = path_of(tensor);
  return path == Path::cuda_kernels && !enabled.contains(kernel) ? Path::aten : path;
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

template <class T>
const Gemm<T>& kernel_gemm() {
  static const KernelGemm<T> gemm;
  return gemm;
}

template const Gemm<double>& kernel_gemm<double>();
template const Gemm<float>& kernel_gemm<float>();
template const Gemm<BFloat16>& kernel_gemm<BFloat16>();
template const Gemm<Float16>& kernel_gemm<Float16>();

}  // namespace maxmoe::ops
