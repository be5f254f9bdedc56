// Argument checks. Every message reads "maxmoe::<operator>: <argument> must <expectation>, got <what it got>".
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#define MAXMOE_CHECK(condition, op, ...) TORCH_CHECK_VALUE(condition, "maxmoe::", op, ": ", __VA_ARGS__)

namespace maxmoe::ops {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// RAII guard for a running operator, or the backward pass of an operator. On devices other than the CPU, the operators
// that it calls do not check values again, because a check takes four kernel launches.
class OperatorCall {
 public:
  OperatorCall() { ++depth_; }
  ~OperatorCall() { --depth_; }
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;

  static bool is_inside_of_another() { return depth_ > 1; }

 private:
  inline static thread_local int depth_ = 0;
};

// A size that an argument must have, and its meaning in messages.
struct Size {
  int64_t size;
  const char* meaning;
};

// One argument of one operator, checked independently of the others.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  // The messages contain `shape` (such as "[T, D]") and `meaning` (such as "D of x").
  const Argument& has_dims(int64_t dims, const char* shape) const;
  const Argument& has_size(int64_t dim, int64_t size, const char* meaning) const;
  const Argument& has_shape(const char* shape, std::initializer_list<Size> sizes) const;
  const Argument& is_floating() const;
  const Argument& is_int64() const;
  const Argument& is_bool() const;
  const Argument& has_dtype_of(const char* other_name, const Tensor& other) const;
  // Checks that every value is in [low, high). Raises at once on the CPU; other devices assert it asynchronously, where
  // no CUDA kernel of the name `kernel` asserts it. It is the last check of an operator, because it reads all values.
  const Argument& has_values_in(int64_t low, int64_t high, const char* meaning, const char* kernel = nullptr) const;

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// Checks all tensors of a call: given unless optional, dense, and on one device. `tensors` has one entry for each
// argument of the schema, null for None and for an argument that is not a tensor.
void check_tensors(const c10::FunctionSchema& schema, std::initializer_list<const Tensor*> tensors);

// The value of an argument that names one of several, a list of pairs. Raises if it names none of them.
template <class Value, class Values = std::initializer_list<std::pair<const char*, Value>>>
Value parse(const char* op, std::string_view argument, std::string_view name, const Values& values) {
  for (const auto& [known, value] : values) {
    if (name == known) return value;
  }
  std::string names;
  for (const auto& [known, value] : values) names += (names.empty() ? "" : ", ") + std::string(known);
  MAXMOE_CHECK(false, op, argument, " must be one of ", names, ", got ", name);
}

// Checks that kernels exist for the dtype.
void check_floating(const char* op, const char* name, at::ScalarType type);

// a * b, the number of slots. Raises if it overflows, naming the argument.
int64_t checked_product(const char* op, const char* name, int64_t a, int64_t b);

// Upper bound for the length of a list of int64: its number of bytes is an int64.
constexpr int64_t kLongestList = int64_t{1} << 60;

// Checks group_sizes, int64 [G]: no size is negative, and their sum is at most, or exactly, num_rows.
enum class Sum { at_most, exactly };
void check_group_sizes(const char* op, const Tensor& group_sizes, int64_t num_rows, Sum sum);

// Checks that a group has at least one slot.
void check_group_size(const char* op, int64_t group_size);

// Checks the weights: a floating dtype, one weight for each of `num_slots` slots.
void check_weights(const char* op, const OptionalTensor& weights, int64_t num_slots);

// Checks the tensors of a plan: slots [R] in [0, T * K), on other devices also -1, and row_of_slot [T * K] in [-1, R).
// A plan whose tensors contradict each other gives wrong rows, but no access out of bounds.
void check_routed_rows(const char* op, const Tensor& slots, const Tensor& row_of_slot, int64_t num_tokens,
                       int64_t num_rows, int64_t top_k);

}  // namespace maxmoe::ops
