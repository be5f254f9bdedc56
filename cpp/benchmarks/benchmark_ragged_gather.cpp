#include "kernels/ragged_gather.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// Every row once, in random order, with a weight.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_gather", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const Table<T> x(shape.num_rows, shape.hidden_size);
  const std::vector<int64_t> index = permutation(shape.num_rows);
  const Table<Accumulator<T>> weights(shape.num_rows, 1);
  const Table<T> out(shape.num_rows, shape.hidden_size);
  const RaggedGather<T> moving{.x = x.read(),
                               .index = index.data(),
                               .weights = weights.data(),
                               .start = 0,
                               .end = shape.num_rows,
                               .out = out.view()};
  session.time(c, bytes(static_cast<int64_t>(x.bytes() + out.bytes())),
               {kernel([&] { ragged_gather(moving, session.threads()); }), move_bound(session.threads(), x, out)});
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
