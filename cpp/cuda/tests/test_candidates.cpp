// The candidates of tests/device compute what the kernels compute.
#include "activation_cases.h"
#include "device/candidates.cu"

namespace maxmoe {
namespace {

TEST(CudaCandidates, SumsHaveTheBitsOfTheKernel) {
  const auto rows = Matrix<BFloat16>::random(13, 40, 1, 0);
  const auto weights = Matrix<float>::random(1, 45, 2);
  const std::vector<int64_t> index = random_index(45, 13, 3);
  const auto run = [&](const auto& sum) {
    return in_every_schedule([&] {
      Matrix<BFloat16> out(9, 40, 0);
      sum(out.view());
      return out;
    });
  };
  const auto want = run([&](MatrixView<BFloat16> out) {
    cuda::ragged_gather_reduce<BFloat16>({rows.view(), index.data(), 5, weights.view().data, nullptr, out}, nullptr);
  });
  for (const int ahead : {1, 2, 4, 8}) {
    EXPECT_TRUE(run([&](MatrixView<BFloat16> out) {
                  maxmoe_candidate_of_sum(ahead, rows.view().data, 13, 40, index.data(), 5, weights.view().data,
                                          out.data, 9, nullptr);
                }) == want);
  }
}

TEST(CudaCandidates, SiluHasTheBitsOfTheKernel) {
  const auto gate = Matrix<BFloat16>::random(3, 40, 1, 0);
  const auto up = Matrix<BFloat16>::random(3, 40, 2, 0);
  Matrix<BFloat16> want(3, 40, 0);
  const ActivationKind kind{Activation::silu, GateLayout::separate, std::numeric_limits<double>::infinity()};
  cuda::activate_rows(cuda::ActivateRows<BFloat16>{kind, gate.view(), up.view(), want.view()}, nullptr);
  for (const int candidate : {0, 1}) {
    Matrix<BFloat16> out(3, 40, 0);
    maxmoe_candidate_of_silu(candidate, gate.view().data, up.view().data, out.view().data, 3, 40, nullptr);
    EXPECT_TRUE(out == want);  // the emulator's approximations have no error
  }
}

}  // namespace
}  // namespace maxmoe
