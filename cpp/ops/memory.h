// Memory of results and work space of the operators.
#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

// at::empty for kernels, except that large tensors on the CPU are allocated in huge pages, which are reused.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Unmaps all freed pages.
void empty_cache();

size_t bytes_allocated();  // bytes of all blocks
size_t bytes_reserved();   // bytes of all blocks and freed pages

}  // namespace maxmoe::ops
