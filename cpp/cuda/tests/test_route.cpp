// Tests of the CUDA kernel route against float64 loops.
#include <algorithm>
#include <limits>
#include <tuple>

#include "emulated.h"
#include "naive_route.h"

namespace maxmoe {
namespace {

template <class T>
Routed<T> run_route(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<T>* bias, int64_t top_k,
                    const int64_t* given = nullptr) {
  return std::make_from_tuple<Routed<T>>(in_every_schedule([&] {
    Routed<T> out{Matrix<T>(logits.rows(), top_k), Matrix<int64_t>(logits.rows(), top_k),
                  Matrix<T>(logits.rows(), logits.columns())};
    cuda::route(Route<T>{logits.view(), bias ? bias->view().data : nullptr, given, rule, out.weights.view(),
                         out.experts.view(), out.probabilities.view()},
                nullptr);
    EXPECT_TRUE(out.weights.gap_is_intact() && out.experts.gap_is_intact() && out.probabilities.gap_is_intact());
    return std::tuple(out.weights, out.experts, out.probabilities);
  }));
}

template <class T>
class CudaRouteTest : public testing::Test {};
TYPED_TEST_SUITE(CudaRouteTest, RouteDtypes, DtypeNames);

TYPED_TEST(CudaRouteTest, MatchesTheLoop) {
  for (const RouteCase& c : kRouteCases) {
    const auto logits = Matrix<TypeParam>::random(5, c.num_experts, 1);
    const auto bias = Matrix<TypeParam>::random(1, c.num_experts, 2);
    for_every_rule(c, [&](const RoutingRule& rule) {
      const Matrix<TypeParam>* const added = rule.normalization == Normalization::none ? nullptr : &bias;
      expect_routed(rule, logits, added, run_route(rule, logits, added, c.top_k));
    });
  }
}

TYPED_TEST(CudaRouteTest, ManyTokensAndExperts) {
  const RoutingRule rule{ScoreFunction::sigmoid, Normalization::sum, 2.5, 4, 2};
  const auto logits = Matrix<TypeParam>::random(23, 160, 1);
  expect_routed<TypeParam>(rule, logits, nullptr, run_route<TypeParam>(rule, logits, nullptr, 40));
  expect_routed<TypeParam>(rule, Matrix<TypeParam>(0, 8), nullptr,
                           run_route<TypeParam>(rule, Matrix<TypeParam>(0, 8), nullptr, 2));
}

// A slot without an expert has weight 0, and the others have the weights that they would have without it.
TYPED_TEST(CudaRouteTest, TakesGivenExperts) {
  const auto logits = Matrix<TypeParam>::random(3, 12, 1);
  for_every_rule({12, 3, 1, 1}, [&](const RoutingRule& rule) {
    const std::vector<int64_t> given = {3, -1, 7, 11, -1, 0, 2, -1, 1};
    const Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 3, given.data());
    for (int64_t t = 0; t < 3; ++t) {
      const auto first = static_cast<size_t>(3 * t);
      const Values weights = naive_weights(rule, row_of(logits, t),
                                           {static_cast<size_t>(given[first]), static_cast<size_t>(given[first + 2])});
      EXPECT_EQ(got.weights(t, 1), 0.0);
      EXPECT_EQ(got.experts.view().row(t)[1], -1);
      EXPECT_EQ(got.experts.view().row(t)[2], given[first + 2]);
      EXPECT_NEAR(got.weights(t, 0), weights[0], tolerance<TypeParam>() * std::max(1.0, std::abs(weights[0])));
      EXPECT_NEAR(got.weights(t, 2), weights[1], tolerance<TypeParam>() * std::max(1.0, std::abs(weights[1])));
    }
  });
}

TYPED_TEST(CudaRouteTest, TheLowestIndexWinsATie) {
  Matrix<TypeParam> logits(1, 80);
  logits.fill(0.5);
  for (const int64_t num_groups : {1, 4}) {
    const RoutingRule rule{ScoreFunction::sigmoid, Normalization::none, 1.0, num_groups, (num_groups + 1) / 2};
    const Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 35);
    for (int64_t k = 0; k < 35; ++k) EXPECT_EQ(got.experts.view().row(0)[k], k);
  }
}

TYPED_TEST(CudaRouteTest, LargeLogitsDoNotOverflow) {
  expect_no_overflow<TypeParam>([](const RoutingRule& rule, const Matrix<TypeParam>& logits, int64_t top_k) {
    return run_route<TypeParam>(rule, logits, nullptr, top_k);
  });
}

TYPED_TEST(CudaRouteTest, NanLogitsChooseNoExpert) {
  for (const ScoreFunction function : kScoreFunctions) {
    const RoutingRule rule{function, Normalization::none, 1.0, 2, 1};
    auto logits = Matrix<TypeParam>::random(3, 80, 1);
    logits.element(1, 75) = std::numeric_limits<TypeParam>::quiet_NaN();
    const Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 2);
    for (int64_t k = 0; k < 2; ++k) {
      EXPECT_EQ(got.experts.view().row(1)[k], kNotANumber);
      EXPECT_EQ(got.weights(1, k), 0.0);
      EXPECT_GE(got.experts.view().row(0)[k], 0);
      EXPECT_GE(got.experts.view().row(2)[k], 0);
    }
  }
}

// The sum of the two best scores of the first group is not a number.
TYPED_TEST(CudaRouteTest, GroupsOfOppositeInfinitiesComeLast) {
  constexpr TypeParam kInfinity = std::numeric_limits<TypeParam>::infinity();
  auto logits = Matrix<TypeParam>::random(1, 6, 1);
  logits.element(0, 0) = kInfinity;
  logits.element(0, 1) = -kInfinity;
  for (const int64_t num_open : {2, 3}) {
    const RoutingRule rule{ScoreFunction::identity, Normalization::none, 1.0, 3, num_open};
    const Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 2 * num_open);
    std::vector<int64_t> chosen(got.experts.view().row(0), got.experts.view().row(0) + 2 * num_open);
    std::sort(chosen.begin(), chosen.end());
    EXPECT_EQ(chosen, num_open == 2 ? std::vector<int64_t>({2, 3, 4, 5}) : std::vector<int64_t>({0, 1, 2, 3, 4, 5}));
  }
}

TEST(CudaRouteErrors, NameOperatorAndArgument) {
  const RoutingRule rule{ScoreFunction::softmax, Normalization::sum, 1.0, 1, 1};
  const auto logits = Matrix<float>::random(1, 4, 1);
  for (const int64_t wrong : {-2, 4}) {
    const std::vector<int64_t> given = {0, wrong};
    EXPECT_EQ(error_of([&] { run_route<float>(rule, logits, nullptr, 2, given.data()); }),
              "maxmoe::route: a value of experts is out of range (-1 or one of E)");
  }
  const auto wide = Matrix<float>::random(1, 30000, 1);
  EXPECT_EQ(error_of([&] { run_route<float>(rule, wide, nullptr, 2); }),
            "maxmoe::route: too many experts for the shared memory of a device: 120016 bytes for a token, at most "
            "98304");
}

}  // namespace
}  // namespace maxmoe
