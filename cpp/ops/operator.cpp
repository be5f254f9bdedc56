#include "ops/operator.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <unordered_map>

#include "ops/registration.h"

namespace maxmoe::ops {
namespace {

// A static variable in a function, because static initializers register operators, in any order.
std::unordered_map<std::string_view, AnyFunction>& calls() {
  static std::unordered_map<std::string_view, AnyFunction> calls;
  return calls;
}

}  // namespace

void add_call(const char* name, AnyFunction call) {
  calls()[name] = call;
}

AnyFunction call_of(const char* name) {
  const auto found = calls().find(name);
  TORCH_INTERNAL_ASSERT(found != calls().end(), "the operator maxmoe::", name, " is not registered");
  return found->second;
}

}  // namespace maxmoe::ops
