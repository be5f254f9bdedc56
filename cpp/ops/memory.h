// The memory of the results and of the work space that operators make.
#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

// Like at::empty. Large tensors on the CPU lie in huge pages that are used again (ops/huge_pages.h).
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace maxmoe::ops
