// The memory of the results and of the work space that operators make.
#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

// Like at::empty. Large tensors lie in huge pages where the system grants them on request.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace maxmoe::ops
