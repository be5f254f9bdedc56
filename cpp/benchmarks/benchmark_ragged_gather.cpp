#include "kernels/rows/ragged_gather.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Gathers every row once, in random order, with a weight.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_gather", [&]<class T>(const Case& c, const RowsShape& shape) {
    const Table<T> x(shape.num_rows, shape.hidden_size);
    const std::vector<int64_t> index = permutation(shape.num_rows);
    const Table<Accumulator<T>> weights(shape.num_rows, 1);
    const Table<T> out(shape.num_rows, shape.hidden_size);
    const RaggedGather<T> gather{.x = x.read(),
                                 .index = index.data(),
                                 .weights = weights.data(),
                                 .start = 0,
                                 .end = shape.num_rows,
                                 .out = out.view()};
    time_read_write(session, c, x, out, [&] { ragged_gather(gather, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
