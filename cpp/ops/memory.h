// Memory of results and work space of the operators.
#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

// at::empty, except that large tensors on the CPU are allocated in huge pages, which are reused (ops/huge_pages.h).
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace maxmoe::ops
