#include "kernels/rows/ragged_sort.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Gathers tokens into the rows of 64 experts, with weights.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_sort", [&]<class T>(const Case& c, const RowsShape& shape) {
    const int64_t num_tokens = shape.num_rows / kTopK;
    const Plan plan(num_tokens, /*num_experts=*/64, kTopK);
    const Table<T> x(num_tokens, shape.hidden_size);
    const Table<Accumulator<T>> weights(shape.num_rows, 1);
    const Table<T> rows(shape.num_rows, shape.hidden_size);
    const RaggedSort<T> sort{
        .x = x.read(), .slots = plan.slots.data(), .top_k = kTopK, .weights = weights.data(), .rows = rows.view()};
    time_read_write(session, c, x, rows, [&] { ragged_sort(sort, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
