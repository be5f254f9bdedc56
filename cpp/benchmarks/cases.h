// Loops over the cases of a benchmark, and kernels that are timed beside their bounds.
#pragma once

#include "contenders.h"

namespace maxmoe::benchmarks {

// Calls body.operator()<T>(case, shape) for every shape and dtype that the session's filter selects.
template <class... Dtypes, class Shapes, class Body>
void for_cases(const Session& session, const char* name, const Shapes& shapes, const Body& body) {
  for (const auto& shape : shapes) {
    const auto run = [&]<class T>() {
      const Case c{name, text(shape), dtype_name<T>()};
      if (session.is_selected(c)) body.template operator()<T>(c, shape);
    };
    (run.template operator()<Dtypes>(), ...);
  }
}

template <class Body>
void for_rows(const Session& session, const char* name, const Body& body) {
  for_cases<float, BFloat16, Float16>(session, name, kRowsShapes, body);
}

template <class Body>
void for_experts(const Session& session, const char* name, const Body& body) {
  for_cases<float, BFloat16>(session, name, kExpertsShapes, body);
}

// Times a call, and one read of `data` as its bound.
template <class T, class Call>
void time_read(Session& session, const Case& c, const T* data, size_t size, const Call& call) {
  session.time(c, bytes(size), {kernel(call), read_bound(session.threads(), data, size)});
}

// Times a call, and one read of `source` and one write of `target` as its bound.
template <class T, class Call>
void time_read_write(Session& session, const Case& c, const Table<T>& source, const Table<T>& target,
                     const Call& call) {
  session.time(c, bytes(source.bytes() + target.bytes()),
               {kernel(call), read_write_bound(session.threads(), source, target)});
}

// Times a call that computes `count` products of all rows, each with one matrix per expert, and the same number of
// dense products as its bound.
template <class T, class Call>
void time_products(Session& session, const Case& c, const ExpertsShape& shape, int64_t count, const Call& call) {
  const int64_t num_rows = shape.num_tokens * shape.top_k;
  const DenseProducts<T> dense(count, num_rows, shape.hidden_size, shape.intermediate_size);
  session.time(c, flops(count * num_rows * shape.hidden_size * shape.intermediate_size),
               {kernel(call), dense.bound(session.threads())});
}

}  // namespace maxmoe::benchmarks
