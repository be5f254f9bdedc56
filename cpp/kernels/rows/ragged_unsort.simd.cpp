#include "kernels/rows/ragged_unsort.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

template <class T>
void ragged_unsort(const RaggedUnsort<T>& a, const Executor& executor) {
  // The K slots of a token are contiguous: they are a group of K rows.
  ragged_gather_reduce(RaggedGatherReduce<T>{a.rows, a.row_of_slot, a.top_k, a.weights, nullptr, a.out}, executor);
}

MAXMOE_INSTANTIATE(ragged_unsort, RaggedUnsort)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
