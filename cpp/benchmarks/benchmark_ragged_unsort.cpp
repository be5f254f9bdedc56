#include "kernels/rows/ragged_unsort.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Sums the rows of 64 experts, with weights, into their tokens.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_unsort", [&]<class T>(const Case& c, const RowsShape& shape) {
    const int64_t num_tokens = shape.num_rows / kTopK;
    const Plan plan(num_tokens, /*num_experts=*/64, kTopK);
    const Table<T> rows(shape.num_rows, shape.hidden_size);
    const Table<Accumulator<T>> weights(shape.num_rows, 1);
    const Table<T> out(num_tokens, shape.hidden_size);
    const RaggedUnsort<T> unsort{.rows = rows.read(),
                                 .row_of_slot = plan.rows.data(),
                                 .top_k = kTopK,
                                 .weights = weights.data(),
                                 .out = out.view()};
    time_read_write(session, c, rows, out, [&] { ragged_unsort(unsort, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
