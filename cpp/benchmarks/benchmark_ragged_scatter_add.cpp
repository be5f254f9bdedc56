#include "kernels/ragged_scatter_add.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// The rows of 64 experts, with weights, to the tokens they came from.
template <class T>
void benchmark(Session& session, const RowsShape& shape) {
  const Case c{"ragged_scatter_add", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const int64_t num_tokens = shape.num_rows / kTopK;
  std::vector<int64_t> index = Plan(num_tokens, /*num_experts=*/64, kTopK).slots;
  for (int64_t& token : index) token /= kTopK;
  const Table<T> rows(shape.num_rows, shape.hidden_size);
  const Table<Accumulator<T>> weights(shape.num_rows, 1);
  std::vector<int64_t> offsets(static_cast<size_t>(num_tokens) + 1);
  std::vector<int64_t> order(index.size());
  const Table<T> out(num_tokens, shape.hidden_size);
  const RaggedScatterAdd<T> moving{.rows = rows.read(),
                                   .index = index.data(),
                                   .index_size = shape.num_rows,
                                   .group_size = 1,
                                   .weights = weights.data(),
                                   .offsets = offsets.data(),
                                   .order = order.data(),
                                   .out = out.view()};
  session.time(
      c, bytes(static_cast<int64_t>(rows.bytes() + out.bytes())),
      {kernel([&] { ragged_scatter_add(moving, session.threads()); }), move_bound(session.threads(), rows, out)});
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
