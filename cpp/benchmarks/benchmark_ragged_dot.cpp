#include "kernels/rows/ragged_dot.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// Dot products of kTopK rows, in random order, with the row of their group.
const Registration registration([](Session& session) {
  for_rows(session, "ragged_dot", [&]<class T>(const Case& c, const RowsShape& shape) {
    const Table<T> both(shape.num_rows / kTopK + shape.num_rows, shape.hidden_size);  // a above b
    const ConstMatrixView<T> a = both.read().row_range(0, shape.num_rows / kTopK);
    const ConstMatrixView<T> b = both.read().row_range(a.rows, a.rows + shape.num_rows);
    const std::vector<int64_t> index = permutation(shape.num_rows);
    const Table<Accumulator<T>> out(shape.num_rows, 1);
    const RaggedDot<T> products{
        .a = a, .b = b, .index = index.data(), .index_size = shape.num_rows, .group_size = kTopK, .out = out.data()};
    time_read(session, c, both.data(), both.bytes(), [&] { ragged_dot(products, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
