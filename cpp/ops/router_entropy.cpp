#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/log.h>
#include <ATen/ops/sum.h>

#include <limits>

#include "kernels/routing/route.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

Tensor router_entropy_aten(const Tensor& probabilities, int64_t divisor) {
  const bool is_double = probabilities.scalar_type() == at::kDouble;
  const double tiny = is_double ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  return probabilities.clamp_min(tiny).log().mul(probabilities).sum().neg().div(divisor);
}

Tensor router_entropy_backend(const Tensor& probabilities, int64_t divisor) {
  constexpr const char* kOp = "router_entropy";
  Argument(kOp, "probabilities", probabilities).has_dims(2, "[T, E]").is_floating();
  MAXMOE_CHECK(divisor >= 1, kOp, "divisor must be at least 1, got ", divisor);
  const Tensor wide = with_dtype(probabilities, accumulator_type(probabilities.scalar_type()));
  if (!uses_kernels(wide)) return router_entropy_aten(wide, divisor);
  const Tensor out = empty({}, wide.options());
  for_accumulator_type(wide.scalar_type(), [&]<class T>() {
    maxmoe::router_entropy(RouterEntropy<T>{Rows(wide), divisor, pointer<T>(out)}, torch_executor());
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<router_entropy, router_entropy_backend, Constant>(
      library, "router_entropy(Tensor probabilities, SymInt divisor) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
