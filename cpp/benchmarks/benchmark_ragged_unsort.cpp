#include "kernels/ragged_unsort.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// The rows of 64 experts, with weights, to their tokens.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_unsort", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const int64_t num_tokens = shape.num_rows / kTopK;
  const Plan plan(num_tokens, /*num_experts=*/64, kTopK);
  const Table<T> rows(shape.num_rows, shape.hidden_size);
  const Table<Accumulator<T>> weights(shape.num_rows, 1);
  const Table<T> out(num_tokens, shape.hidden_size);
  const RaggedUnsort<T> moving{.rows = rows.read(),
                               .row_of_slot = plan.rows.data(),
                               .top_k = kTopK,
                               .weights = weights.data(),
                               .out = out.view()};
  session.time(c, bytes(static_cast<int64_t>(rows.bytes() + out.bytes())),
               {kernel([&] { ragged_unsort(moving, session.threads()); }), move_bound(session.threads(), rows, out)});
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
