#include "kernels/rows/ragged_scatter_add.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Adds the rows of 64 experts, with weights, to their tokens.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_scatter_add", [&]<class T>(const Case& c, const RowsShape& shape) {
    const int64_t num_tokens = shape.num_rows / kTopK;
    std::vector<int64_t> index = Plan(num_tokens, /*num_experts=*/64, kTopK).slots;
    for (int64_t& token : index) token /= kTopK;
    const Table<T> rows(shape.num_rows, shape.hidden_size);
    const Table<Accumulator<T>> weights(shape.num_rows, 1);
    std::vector<int64_t> scratch(static_cast<size_t>(num_tokens) + 1 + index.size());
    const Table<T> out(num_tokens, shape.hidden_size);
    const RaggedScatterAdd<T> scatter{.rows = rows.read(),
                                      .index = index.data(),
                                      .index_size = shape.num_rows,
                                      .group_size = 1,
                                      .weights = weights.data(),
                                      .scratch = scratch.data(),
                                      .out = out.view()};
    time_read_write(session, c, rows, out, [&] { ragged_scatter_add(scatter, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
