// Tests of the CUDA kernel activate_rows: f(gate) * up.
#include "activation_cases.h"

namespace maxmoe {
namespace {

template <class T>
class CudaActivateRowsTest : public testing::Test {};
TYPED_TEST_SUITE(CudaActivateRowsTest, Dtypes, DtypeNames);

TYPED_TEST(CudaActivateRowsTest, MatchesTheLoop) {
  for_every_activation([](const ActivationKind& kind, int64_t columns, int64_t gap) {
    GateAndUp<TypeParam> in(kind.gate, 3, columns, gap);
    const auto out = run_emulated<TypeParam>(3, columns, gap, [&](MatrixView<TypeParam> view) {
      cuda::activate_rows(cuda::ActivateRows<TypeParam>{kind, in.gate().as_const(), in.up().as_const(), view}, nullptr);
    });
    expect_near(
        out, [&](int64_t r, int64_t c) { return naive_activated(kind, in.value(false, r, c), in.value(true, r, c)); });
  });
}

TEST(CudaActivateRowsNan, StaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Matrix<float> gate(1, 2);
  Matrix<float> up(1, 2);
  gate.element(0, 0) = up.element(0, 1) = nan;
  gate.element(0, 1) = up.element(0, 0) = 1.0F;
  for (const ActivationKind& kind : activation_kinds()) {
    const auto out = run_emulated<float>(1, 2, 3, [&](MatrixView<float> view) {
      cuda::activate_rows(cuda::ActivateRows<float>{kind, gate.view().as_const(), up.view().as_const(), view}, nullptr);
    });
    EXPECT_TRUE(std::isnan(out(0, 1)));
    EXPECT_EQ(std::isnan(out(0, 0)), kind.gate != GateLayout::none);
  }
}

}  // namespace
}  // namespace maxmoe
