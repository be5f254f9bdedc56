// Tests of the emulator: it reports the mistakes of kernels that it is meant to report.
#include "cuda/launch.h"
#include "emulated.h"

namespace maxmoe {
namespace {

namespace cu = cuda;
using cu::kAllLanes;
using cu::emulator::Order;

// The error of a kernel with one block of 64 threads.
template <class Kernel>
std::string error_in_block(const Kernel& kernel, cu::emulator::Schedule schedule = {}) {
  cu::emulator::schedule = schedule;
  const std::string error = error_of([&] { cu::emulator::run_grid(1, 64, 1024, kernel); });
  cu::emulator::schedule = {};
  return error.substr(0, error.find(" ("));
}

TEST(CudaEmulator, ReportsBarriersThatNotAllThreadsReach) {
  EXPECT_EQ(error_in_block([] {
              if (threadIdx.x != 5) __syncthreads();
            }),
            "a barrier that not all threads of the block reach");
  EXPECT_EQ(error_in_block([] { __syncthreads(); }), "");
}

TEST(CudaEmulator, ReportsDivergentLanes) {
  EXPECT_EQ(error_in_block([] { threadIdx.x % 2 == 0 ? __syncwarp() : __syncthreads(); }),
            "lanes wait for lanes that do something else");
  EXPECT_EQ(error_in_block([] {
              if (threadIdx.x % 2 == 0) {
                __syncwarp();
              } else {
                __ballot_sync(kAllLanes, true);
              }
            }),
            "lanes of a warp in different collectives");
  EXPECT_EQ(error_in_block([] {
              if (threadIdx.x % 2 == 0) return;
              __syncwarp();
            }),
            "a collective with a lane that has ended");
  EXPECT_EQ(error_in_block([] { __ballot_sync(1, true); }), "a collective whose mask lacks the calling lane");
}

TEST(CudaEmulator, ReportsAddressesThatAreNotAligned) {
  EXPECT_EQ(error_in_block([] {
              uint32_t registers[4];
              cu::load_matrices<false>(registers, cu::emulator::shared_memory() + 8);
            }),
            "ldmatrix of an address that is not aligned");
  alignas(16) static const float numbers[8] = {};
  EXPECT_EQ(error_in_block([] { cu::copy_async(cu::emulator::shared_memory(), numbers + 1, 16); }),
            "cp.async of an address that is not aligned");
  EXPECT_EQ(error_in_block([] {
              float values[4];
              cu::load(numbers + 1, values);
            }),
            "a load of an address that is not aligned");
}

TEST(CudaEmulator, ReportsCopiesThatAreNotCommitted) {
  alignas(16) static const float numbers[4] = {};
  EXPECT_EQ(error_in_block([] { cu::copy_async(cu::emulator::shared_memory(), numbers, 16); }),
            "a thread ends with copies that it has not committed");
}

// Number 0 of the shared memory, which thread 0 has copied there, as thread 40 reads it.
float copied_number(bool has_wait, bool has_barrier, Order order, bool copies_late) {
  alignas(16) static const float numbers[4] = {3, 0, 0, 0};
  static float seen;
  error_in_block(
      [=] {
        float* const shared = reinterpret_cast<float*>(cu::emulator::shared_memory());
        if (threadIdx.x == 0) cu::copy_async(shared, numbers, 16);
        cu::commit_copies();
        if (has_wait) cu::wait_for_copies<0>();
        if (has_barrier) __syncthreads();
        if (threadIdx.x == 40) seen = shared[0];
      },
      {order, 1, copies_late, 1, 1});
  return seen;
}

TEST(CudaEmulator, ShowsMissingWaitsAndBarriers) {
  for (const Order order : {Order::forward, Order::backward, Order::random}) {
    for (const bool copies_late : {false, true}) {
      EXPECT_EQ(copied_number(true, true, order, copies_late), 3.0F);
      EXPECT_EQ(std::isnan(copied_number(false, true, order, copies_late)), copies_late);
    }
  }
  EXPECT_TRUE(std::isnan(copied_number(true, false, Order::backward, true)));
}

TEST(CudaEmulator, FragmentsOfAProduct) {
  static float sums[16][8];
  EXPECT_EQ(error_in_block([] {
              if (threadIdx.x >= 32) return;
              auto* const a = reinterpret_cast<BFloat16*>(cu::emulator::shared_memory());  // [16, 16]
              BFloat16* const b = a + 256;                                                 // [16, 8]
              for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) a[i] = narrow<BFloat16>(i % 7 - 3.0F);
              for (int i = static_cast<int>(threadIdx.x); i < 128; i += 32) b[i] = narrow<BFloat16>(i % 5 - 2.0F);
              __syncwarp();
              const int lane = cu::lane_index();
              uint32_t left[4];
              uint32_t right[4];
              cu::load_matrices<false>(left, a + lane % 16 * 16 + lane / 16 * 8);
              cu::load_matrices<true>(right, b + lane % 16 * 8);
              float own[4] = {};
              cu::multiply_tile<BFloat16>(own, left, {right[0], right[1]});
              for (int e = 0; e < 4; ++e) sums[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2] = own[e];
            }),
            "");
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 8; ++c) {
      int want = 0;
      for (int k = 0; k < 16; ++k) want += ((r * 16 + k) % 7 - 3) * ((k * 8 + c) % 5 - 2);
      EXPECT_EQ(sums[r][c], static_cast<float>(want));
    }
  }
}

}  // namespace
}  // namespace maxmoe
