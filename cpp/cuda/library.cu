#include "cuda/library.h"

#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

#ifdef __CUDACC__
__global__ void nothing() {}

// The kernels are linked with the CUDA runtime, which needs a driver of at least its major version.
const char* unusable() {
  int driver = 0;
  int runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "there is no NVIDIA driver";
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess || driver / 1000 < runtime / 1000) {
    return "the NVIDIA driver is older than the CUDA that the kernels were compiled with";
  }
  // The error on a device that no kernel was compiled for.
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, nothing);
  cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

int compute_capability(int device_index) {
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index);
  return 10 * major + minor;
}

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  return status != cudaStreamCaptureStatusNone;
}
#else
const char* unusable() {
  return nullptr;
}
int compute_capability(int /*device_index*/) {
  return emulator::device.compute_capability;
}
bool is_capturing(Stream /*stream*/) {
  return emulator::device.is_capturing;
}
#endif

template <class T>
constexpr RowKernels<T> row_kernels() {
  return {ragged_gather<T>, ragged_gather_reduce<T>, ragged_gather_reduce_of_two<T>, ragged_scatter_add<T>,
          ragged_dot<T>,    activate_rows<T>,        activate_rows_backward<T>,      gmm<T>,
          tgmm<T>};
}

template <class T>
constexpr RouteKernels<T> route_kernels() {
  return {route<T>, route_backward<T>};
}

}  // namespace
}  // namespace maxmoe::cuda

const maxmoe::cuda::Library* maxmoe_cuda_library() {
  using namespace maxmoe;
  using namespace maxmoe::cuda;
  static const Library library{kLayout,
                               unusable,
                               compute_capability,
                               is_capturing,
                               ragged_plan_scratch,
                               ragged_scatter_add_scratch,
                               ragged_plan,
                               check_plan,
                               {row_kernels<double>(), row_kernels<float>(), row_kernels<BFloat16>(),
                                row_kernels<Float16>(), route_kernels<double>(), route_kernels<float>()}};
  return &library;
}

// For tests.
#ifndef __CUDACC__
// A line "operator launches loaded stored" for each operator that this thread has run since the last call.
extern "C" __attribute__((visibility("default"))) const char* maxmoe_cuda_emulator_traffic() {
  using maxmoe::cuda::emulator::traffic_of;
  thread_local std::string lines;
  lines.clear();
  for (const auto& [op, moved] : std::exchange(traffic_of, {})) {
    lines += op + " " + std::to_string(moved.launches) + " " + std::to_string(moved.loaded) + " " +
             std::to_string(moved.stored) + "\n";
  }
  return lines.c_str();
}

extern "C" __attribute__((visibility("default"))) void maxmoe_cuda_emulator_pretend(int compute_capability,
                                                                                    bool is_capturing) {
  maxmoe::cuda::emulator::device = {compute_capability, is_capturing};
}
#endif
