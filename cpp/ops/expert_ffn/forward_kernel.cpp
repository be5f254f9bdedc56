// The forward pass of expert_ffn on the CPU: turns tensors into views of memory, and calls the kernel.
#include "ops/expert_ffn/views.h"

namespace maxmoe::ops {

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_intermediates) {
  const ExpertFfnArguments k = kernel_layout(a);
  const int64_t num_rows = a.slots.size(0);
  const Tensor out = empty({a.x.size(0), a.x.size(1)}, a.x.options());
  // The output of each row is work space. Summing rows into `out` at once would add them in the order of the threads.
  const Tensor row_outputs = empty({num_rows, a.x.size(1)}, a.x.options());
  const Intermediates kept = empty_intermediates(keeps_intermediates ? num_rows : 0, a);
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    ExpertFfn<T> arguments = forward_arguments<T>(k);
    arguments.weights = const_pointer<Accumulator<T>>(k.weights);
    arguments.preactivations = view_if<T>(keeps_intermediates, kept.preactivations);
    if (keeps_intermediates) arguments.reduced = reduced_rows<T>(kept.reduced, k);
    arguments.rows = view<T>(row_outputs);
    arguments.out = view<T>(out);
    maxmoe::expert_ffn(arguments, torch_executor());
  });
  return {out, kept.preactivations, kept.reduced};
}

}  // namespace maxmoe::ops
