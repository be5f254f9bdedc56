#include "kernels/ragged_dot.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// Each of kTopK rows, in random order, with the one row of their group.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_dot", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const Table<T> both(shape.num_rows / kTopK + shape.num_rows, shape.hidden_size);  // a above b
  const ConstMatrixView<T> a = both.read().row_range(0, shape.num_rows / kTopK);
  const ConstMatrixView<T> b = both.read().row_range(a.rows, a.rows + shape.num_rows);
  const std::vector<int64_t> index = permutation(shape.num_rows);
  const Table<Accumulator<T>> out(shape.num_rows, 1);
  const RaggedDot<T> products{
      .a = a, .b = b, .index = index.data(), .index_size = shape.num_rows, .group_size = kTopK, .out = out.data()};
  session.time(c, bytes(static_cast<int64_t>(both.bytes())),
               {kernel([&] { ragged_dot(products, session.threads()); }),
                read_bound(session.threads(), both.data(), both.bytes())});
}

const Registration registration([](Session& session) {
  for (const RowsShape& shape : kRowsShapes) {
    benchmark<float>(session, shape);
    benchmark<BFloat16>(session, shape);
    benchmark<Float16>(session, shape);
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
