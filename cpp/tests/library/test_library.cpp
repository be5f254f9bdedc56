// The library of the operators in a C++ program, without Python: build information, forced paths, memory, and operators
// through the dispatcher, with their gradients.
#include "library.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "ops/operators.h"

namespace maxmoe {
namespace {

TEST(Library, BuildInformation) {
  const BuildInfo info = build_info();
  EXPECT_EQ(info.torch.substr(0, 2), "2.");
  EXPECT_NE(std::find(info.supported_isas.begin(), info.supported_isas.end(), info.isa), info.supported_isas.end());
  EXPECT_GE(info.second_level_cache_bytes, 1 << 16);
}

TEST(Library, ForcedPathsAreNamed) {
  EXPECT_EQ(force_path("aten"), "kernels");
  EXPECT_EQ(force_path("kernels"), "aten");
  try {
    force_path("cuda");
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(error.msg().find("must be kernels, cuda_emulator or aten, got cuda"), std::string::npos) << error.msg();
  }
}

// Two groups of rows, the second one empty, and rows after the last group.
TEST(Library, ProductsOfGroupsAndTheirGradients) {
  const auto options = at::dtype(at::kDouble);
  const at::Tensor lhs = at::randn({5, 3}, options).set_requires_grad(true);
  const at::Tensor rhs = at::randn({3, 3, 4}, options).set_requires_grad(true);
  const at::Tensor sizes = at::tensor({2, 0, 2}, at::kLong);
  ops::Projection projection;
  projection.tensor = rhs;
  const at::Tensor out = ops::gmm(lhs, projection, sizes, 0);
  const at::Tensor expected =
      at::cat({lhs.narrow(0, 0, 2).mm(rhs[0]), lhs.narrow(0, 2, 2).mm(rhs[2]), at::zeros({1, 4}, options)});
  EXPECT_TRUE(at::allclose(out, expected));
  const at::Tensor cotangent = at::randn_like(out);
  const auto got = torch::autograd::grad({out}, {lhs, rhs}, {cotangent});
  const auto wanted = torch::autograd::grad({expected}, {lhs, rhs}, {cotangent});
  for (size_t input = 0; input < wanted.size(); ++input) EXPECT_TRUE(at::allclose(got[input], wanted[input]));
}

TEST(Library, AWrongSizeIsNamed) {
  try {
    ops::tgmm(at::randn({4, 3}), at::randn({5, 2}), at::tensor({4}, at::kLong), 1, 0);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(error.msg().find("maxmoe::tgmm: rhs must have"), std::string::npos) << error.msg();
  }
}

TEST(Library, MemoryOfResultsIsCountedAndReturned) {
  const size_t before = memory_allocated();
  {
    const at::Tensor rows = at::randn({1 << 13, 1 << 8});
    const at::Tensor out = ops::ragged_gather(rows, at::arange(rows.size(0)), std::nullopt, 0, std::nullopt);
    EXPECT_TRUE(at::equal(out, rows));
    EXPECT_GE(memory_allocated() - before, out.nbytes());
  }
  EXPECT_EQ(memory_allocated(), before);
  EXPECT_GT(memory_reserved(), before);
  empty_cache();
  EXPECT_EQ(memory_reserved(), memory_allocated());
}

}  // namespace
}  // namespace maxmoe
