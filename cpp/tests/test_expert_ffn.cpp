// Tests of the forward pass of the fused experts against float64 loops.
#include "kernels/experts/expert_ffn.h"

#include <gtest/gtest.h>

#include <limits>

#include "ffn_runs.h"

namespace maxmoe {
namespace {

template <class T>
class ExpertFfnTest : public testing::Test {};
TYPED_TEST_SUITE(ExpertFfnTest, Dtypes, DtypeNames);

TYPED_TEST(ExpertFfnTest, MatchesTheLoop) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const NaiveFfn<TypeParam> naive(shape, variant.kind, variant.biased, variant.weighted, tensors, tensors);
    expect_near(run_forward(shape, variant, tensors).out, naive(0.0), 16.0);
  });
}

TYPED_TEST(ExpertFfnTest, MoreRowsThanOneTileAndColumnsThanOneBlock) {
  const FfnShape shape{all_to_one_routing(150, 2, 1), 131, 270};
  const double no_limit = std::numeric_limits<double>::infinity();
  const Variant variant{{Activation::silu, GateLayout::separate, no_limit}, true, true};
  const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
  const NaiveFfn<TypeParam> naive(shape, variant.kind, variant.biased, variant.weighted, tensors, tensors);
  expect_near(run_forward(shape, variant, tensors).out, naive(0.0), 64.0);
}

// The factors stand for the matrices W + reduce * expand, which the loop gets.
TYPED_TEST(ExpertFfnTest, LowRankFactorsMatchTheLoopOfMergedMatrices) {
  for_every_low_rank_case([](const FfnShape& shape, const Variant& variant, const FactorShape& ranks) {
    const GateLayout layout = variant.kind.gate;
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto factors = FfnFactors<TypeParam>::random(shape, layout, ranks, 50);
    const FfnTensors<double> sums = merged(layout, tensors, factors);
    const NaiveFfn<double> naive(shape, variant.kind, variant.biased, variant.weighted, sums, sums);
    expect_near(run_forward(shape, variant, tensors, factors).out, naive(0.0), 16.0);
  });
}

}  // namespace
}  // namespace maxmoe
