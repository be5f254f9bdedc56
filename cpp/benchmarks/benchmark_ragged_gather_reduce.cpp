#include "kernels/rows/ragged_gather_reduce.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Sums kTopK rows per result, in random order, with weights. Every row is read once.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_gather_reduce", [&]<class T>(const Case& c, const RowsShape& shape) {
    const Table<T> rows(shape.num_rows, shape.hidden_size);
    const std::vector<int64_t> index = permutation(shape.num_rows);
    const Table<Accumulator<T>> weights(shape.num_rows, 1);
    const Table<T> out(shape.num_rows / kTopK, shape.hidden_size);
    const RaggedGatherReduce<T> reduce{.rows = rows.read(),
                                       .index = index.data(),
                                       .group_size = kTopK,
                                       .weights = weights.data(),
                                       .valid = nullptr,
                                       .out = out.view()};
    time_read_write(session, c, rows, out, [&] { ragged_gather_reduce(reduce, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
