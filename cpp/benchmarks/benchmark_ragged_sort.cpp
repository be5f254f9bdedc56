#include "kernels/ragged_sort.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// Tokens to the rows of 64 experts, with weights.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_sort", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const int64_t num_tokens = shape.num_rows / kTopK;
  const Plan plan(num_tokens, /*num_experts=*/64, kTopK);
  const Table<T> x(num_tokens, shape.hidden_size);
  const Table<Accumulator<T>> weights(shape.num_rows, 1);
  const Table<T> rows(shape.num_rows, shape.hidden_size);
  const RaggedSort<T> moving{
      .x = x.read(), .slots = plan.slots.data(), .top_k = kTopK, .weights = weights.data(), .rows = rows.view()};
  session.time(c, bytes(static_cast<int64_t>(x.bytes() + rows.bytes())),
               {kernel([&] { ragged_sort(moving, session.threads()); }), move_bound(session.threads(), x, rows)});
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
