#include "ops/cuda_kernels.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

#include "ops/torch_internals.h"

namespace maxmoe::ops {
namespace {

// A library, or the reason why it cannot be used.
struct Opened {
  const cuda::Library* library = nullptr;
  std::string problem;
};

// The folder of this library.
std::filesystem::path folder() {
  Dl_info info;
  static const char here = 0;
  return dladdr(&here, &info) != 0 ? std::filesystem::path(info.dli_fname).parent_path() : std::filesystem::path();
}

Opened open(const char* name) {
  const std::filesystem::path path = folder() / name;
  if (!std::filesystem::exists(path)) return {nullptr, std::string(name) + " is not built"};
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {nullptr, dlerror()};
  const auto table = reinterpret_cast<decltype(&maxmoe_cuda_library)>(dlsym(handle, "maxmoe_cuda_library"));
  if (table == nullptr) return {nullptr, std::string(name) + " has no kernels"};
  const cuda::Library* const library = table();
  if (library->layout != cuda::kLayout) return {nullptr, std::string(name) + " was built from other sources"};
  if (const char* const problem = library->unusable(); problem != nullptr) return {nullptr, problem};
  return {library, ""};
}

// Opened when the first tensor of a GPU arrives, or when its state is asked for.
const Opened& gpu_library() {
  static const Opened opened = open("libmaxmoe_cuda.so");
  return opened;
}

const Opened& emulator_library() {
  static const Opened opened = open("libmaxmoe_cuda_emulator.so");
  return opened;
}

}  // namespace

std::optional<CudaKernels> cuda_kernels(const at::Tensor& tensor, const char* kernel) {
  if (path_of(tensor, kernel) != Path::cuda_kernels) return std::nullopt;
  if (tensor.is_cpu()) return CudaKernels{emulator_library().library, nullptr};
  return CudaKernels{gpu_library().library, torch_internals::current_stream(tensor.device())};
}

bool has_cuda_kernels() {
  return gpu_library().library != nullptr;
}

std::string state_of_cuda_kernels() {
  return has_cuda_kernels() ? "usable" : gpu_library().problem;
}

void open_cuda_emulator() {
  TORCH_CHECK(emulator_library().library != nullptr, "the emulator of CUDA cannot be used, because ",
              emulator_library().problem,
              ". It is built with the tests: CMAKE_ARGS=-DMAXMOE_BUILD_TESTS=ON pip install --no-build-isolation -e .");
}

}  // namespace maxmoe::ops
