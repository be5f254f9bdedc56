// Argument checks. Every message reads "maxmoe::<operator>: <argument> must <expectation>, got <what it got>".
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>

#define MAXMOE_CHECK(condition, op, ...) TORCH_CHECK_VALUE(condition, "maxmoe::", op, ": ", __VA_ARGS__)

namespace maxmoe::ops {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// An operator that runs. Inside of another one it is a part of that, and values on other devices than the CPU are not
// checked a second time.
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

// One argument of one operator, checked on its own.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  // The shape in words, such as "[T, D]", is for the message.
  const Argument& has_dims(int64_t dims, const char* shape) const;
  const Argument& has_size(int64_t dim, int64_t size, const char* meaning) const;
  const Argument& is_floating() const;
  const Argument& is_int64() const;
  const Argument& is_bool() const;
  const Argument& has_dtype_of(const char* other_name, const Tensor& other) const;
  // Every value lies in [low, high). Waits for the answer on CPU; other devices assert when they get there.
  const Argument& has_values_in(int64_t low, int64_t high, const char* meaning) const;

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// All tensors of a call, in the order of the schema, null for an argument that is none: given unless optional, dense,
// and on one device.
void check_tensors(const c10::FunctionSchema& schema, std::initializer_list<const Tensor*> tensors);

// A dtype that the kernels know.
void check_floating(const char* op, const char* name, at::ScalarType type);

// a * b, the number of slots that an argument must have.
int64_t checked_product(const char* op, const char* name, int64_t a, int64_t b);

// No list of int64 is longer: its bytes are counted in one.
constexpr int64_t kLongestList = int64_t{1} << 60;

// Row counts of groups: int64 [G], none negative, with a sum of at most num_rows, or of exactly that.
enum class Sum { at_most, exactly };
void check_group_sizes(const char* op, const Tensor& group_sizes, int64_t num_rows, Sum sum);

// Weights of slots: floating, one for each of `count` slots.
void check_weights(const char* op, const OptionalTensor& weights, int64_t count);

}  // namespace maxmoe::ops
