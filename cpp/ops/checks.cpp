#include "ops/checks.h"

#include <c10/util/safe_numerics.h>

#include <span>

#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/torch_internals.h"
#include "ops/views.h"

namespace maxmoe::ops {

const Argument& Argument::has_dims(int64_t dims, const char* shape) const {
  MAXMOE_CHECK(tensor_.dim() == dims, op_, name_, " must be ", shape, ", got shape ", tensor_.sizes());
  return *this;
}

const Argument& Argument::has_size(int64_t dim, int64_t size, const char* meaning) const {
  MAXMOE_CHECK(tensor_.size(dim) == size, op_, name_, " must have size ", size, " (", meaning, ") in dim ", dim,
               ", got shape ", tensor_.sizes());
  return *this;
}

const Argument& Argument::has_shape(const char* shape, std::initializer_list<Size> sizes) const {
  has_dims(static_cast<int64_t>(sizes.size()), shape);
  int64_t dim = 0;
  for (const auto& [size, meaning] : sizes) has_size(dim++, size, meaning);
  return *this;
}

const Argument& Argument::is_floating() const {
  check_floating(op_, name_, tensor_.scalar_type());
  return *this;
}

const Argument& Argument::is_int64() const {
  MAXMOE_CHECK(tensor_.scalar_type() == at::kLong, op_, name_, " must be int64, got ", tensor_.scalar_type());
  return *this;
}

const Argument& Argument::is_bool() const {
  MAXMOE_CHECK(tensor_.scalar_type() == at::kBool, op_, name_, " must be bool, got ", tensor_.scalar_type());
  return *this;
}

const Argument& Argument::has_dtype_of(const char* other_name, const Tensor& other) const {
  MAXMOE_CHECK(tensor_.scalar_type() == other.scalar_type(), op_, name_, " must have the dtype of ", other_name, " (",
               other.scalar_type(), "), got ", tensor_.scalar_type());
  return *this;
}

const Argument& Argument::has_values_in(int64_t low, int64_t high, const char* meaning, const char* kernel) const {
  if (tensor_.numel() == 0) return *this;
  if (!tensor_.is_cpu()) {
    if (kernel != nullptr && path_of(tensor_, kernel) == Path::cuda_kernels) return *this;
    if (OperatorCall::is_inside_of_another()) return *this;
    torch_internals::assert_async(
        tensor_.clamp(low, high - 1).eq(tensor_).all(),
        std::string("maxmoe::") + op_ + ": a value of " + name_ + " is out of range (" + meaning + ")");
    return *this;
  }
  const Tensor values = tensor_.contiguous();
  for (const int64_t value : std::span(values.const_data_ptr<int64_t>(), static_cast<size_t>(values.numel()))) {
    MAXMOE_CHECK(low <= value && value < high, op_, name_, " must be in [", low, ", ", high, ") (", meaning, "), got ",
                 value);
  }
  return *this;
}

void check_tensors(const c10::FunctionSchema& schema, std::initializer_list<const Tensor*> tensors) {
  const std::span arguments(tensors.begin(), tensors.size());
  const auto op = [&] { return schema.name().substr(std::string_view("maxmoe::").size()); };
  const auto name = [&](size_t position) { return schema.arguments()[position].name(); };
  std::optional<size_t> first;
  for (size_t position = 0; position < arguments.size(); ++position) {
    if (arguments[position] == nullptr) {
      const bool is_missing = schema.arguments()[position].type()->kind() == c10::TypeKind::TensorType;
      MAXMOE_CHECK(!is_missing, op(), name(position), " must be a tensor, got None");
      continue;
    }
    const Tensor& tensor = *arguments[position];
    first = first.value_or(position);
    MAXMOE_CHECK(tensor.layout() == at::kStrided, op(), name(position), " must be a dense tensor, got layout ",
                 tensor.layout());
    MAXMOE_CHECK(tensor.device() == arguments[*first]->device(), op(), name(position), " must be on the device of ",
                 name(*first), " (", arguments[*first]->device(), "), got ", tensor.device());
  }
}

void check_floating(const char* op, const char* name, at::ScalarType type) {
  const bool known = type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  MAXMOE_CHECK(known, op, name, " must be float64, float32, bfloat16 or float16, got ", type);
}

int64_t checked_product(const char* op, const char* name, int64_t a, int64_t b) {
  int64_t product = 0;
  MAXMOE_CHECK(!c10::mul_overflows(a, b, &product), op, name, " must have fewer than 2**63 slots, got ", a, " * ", b);
  return product;
}

namespace {

constexpr const char* kCheckPlan = "check_plan";

// Asserts the values of a plan by the CUDA kernel, if there is one: one launch where ATen takes four for each list.
// Returns whether there is one.
bool check_in_kernel(const OptionalTensor& slots, const OptionalTensor& rows, const OptionalTensor& group_sizes,
                     int64_t num_slots, int64_t num_rows) {
  const auto kernels = cuda_kernels(slots.has_value() ? *slots : *group_sizes, kCheckPlan);
  if (!kernels.has_value()) return false;
  if (OperatorCall::is_inside_of_another()) return true;
  const auto size = [](const OptionalTensor& list) { return list.has_value() ? list->numel() : 0; };
  kernels->library->check_plan(
      {num_slots, num_rows, List(slots), size(slots), List(rows), size(rows), List(group_sizes), size(group_sizes)},
      kernels->stream);
  return true;
}

void check_group_sizes_on_host(const char* op, const Tensor& sizes, int64_t num_rows, Sum sum) {
  int64_t total = 0;
  for (int64_t group = 0; group < sizes.numel(); ++group) {
    const int64_t size = sizes.const_data_ptr<int64_t>()[group];
    MAXMOE_CHECK(size >= 0, op, "group_sizes must not be negative, got ", size, " for group ", group);
    MAXMOE_CHECK(size <= num_rows - total, op, "group_sizes must sum to at most the number of rows (", num_rows,
                 "), got more with group ", group, " of ", size);
    total += size;
  }
  MAXMOE_CHECK(sum == Sum::at_most || total == num_rows, op, "group_sizes must sum to the number of rows (", num_rows,
               "), got ", total);
}

}  // namespace

void check_group_sizes(const char* op, const Tensor& group_sizes, int64_t num_rows, Sum sum) {
  Argument(op, "group_sizes", group_sizes).has_dims(1, "[G]").is_int64();
  if (group_sizes.is_cpu()) check_group_sizes_on_host(op, group_sizes.contiguous(), num_rows, sum);
  if (check_in_kernel({}, {}, group_sizes, 0, num_rows)) return;
  if (group_sizes.is_cpu() || OperatorCall::is_inside_of_another()) return;
  const Tensor total = group_sizes.sum();
  const Tensor fits = sum == Sum::exactly ? total.eq(num_rows) : total.le(num_rows);
  torch_internals::assert_async(group_sizes.ge(0).all().logical_and(fits),
                                std::string("maxmoe::") + op + ": group_sizes does not fit the rows");
}

void check_group_size(const char* op, int64_t group_size) {
  MAXMOE_CHECK(group_size >= 1, op, "group_size must be at least 1, got ", group_size);
}

void check_weights(const char* op, const OptionalTensor& weights, int64_t num_slots) {
  if (!weights.has_value()) return;
  Argument(op, "weights", *weights).is_floating();
  MAXMOE_CHECK(weights->numel() == num_slots, op, "weights must have ", num_slots,
               " elements, one for each slot, got shape ", weights->sizes());
}

void check_routed_rows(const char* op, const Tensor& slots, const Tensor& row_of_slot, int64_t num_tokens,
                       int64_t num_rows, int64_t top_k) {
  MAXMOE_CHECK(top_k >= 1, op, "top_k must be at least 1, got ", top_k);
  Argument(op, "plan.slots", slots).has_dims(1, "[R]").is_int64();
  Argument(op, "plan.rows", row_of_slot).has_dims(1, "[T * K]").is_int64();
  const int64_t num_slots = checked_product(op, "top_k", num_tokens, top_k);
  Argument(op, "plan.rows", row_of_slot).has_size(0, num_slots, "T * K");
  Argument(op, "plan.slots", slots)
      .has_values_in(uses_kernels(slots) ? 0 : -1, num_slots, "a slot of T * K", kCheckPlan);
  Argument(op, "plan.rows", row_of_slot).has_values_in(-1, num_rows, "-1 or one of R rows", kCheckPlan);
  check_in_kernel(slots, row_of_slot, {}, num_slots, num_rows);
}

}  // namespace maxmoe::ops
