#include "kernels/ragged_gather_reduce.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// Every row once, in random order, with a weight; kTopK to a sum.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_gather_reduce", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const Table<T> rows(shape.num_rows, shape.hidden_size);
  const std::vector<int64_t> index = permutation(shape.num_rows);
  const Table<Accumulator<T>> weights(shape.num_rows, 1);
  const Table<T> out(shape.num_rows / kTopK, shape.hidden_size);
  const RaggedGatherReduce<T> moving{.rows = rows.read(),
                                     .index = index.data(),
                                     .group_size = kTopK,
                                     .weights = weights.data(),
                                     .valid = nullptr,
                                     .out = out.view()};
  session.time(
      c, bytes(static_cast<int64_t>(rows.bytes() + out.bytes())),
      {kernel([&] { ragged_gather_reduce(moving, session.threads()); }), move_bound(session.threads(), rows, out)});
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
