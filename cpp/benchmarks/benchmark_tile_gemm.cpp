#include "kernels/product/tiled/tile_gemm.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

// c [T, F] = a [T, D] * b [D, F]. In the other two products of a layer, a or b is transposed.
struct ProductShape {
  int64_t num_rows;
  int64_t depth;
  int64_t num_columns;
};
constexpr ProductShape kProductShapes[] = {{2048, 512, 1024}, {2048, 512, 192}, {256, 512, 192}, {16, 512, 192}};
enum class Transposed { none, a, b };

template <class T>
ConstMatrixView<T> view(const Table<T>& table, bool is_transposed) {
  return is_transposed ? table.read().transposed() : table.read();
}

template <class T>
void benchmark(Session& session, const ProductShape& shape, Transposed transposed) {
  const bool is_a = transposed == Transposed::a;
  const bool is_b = transposed == Transposed::b;
  const Case c{"tile_gemm",
               text({{'T', shape.num_rows}, {'D', shape.depth}, {'F', shape.num_columns}}) +
                   (is_a ? ", a transposed" : "") + (is_b ? ", b transposed" : ""),
               dtype_name<T>()};
  if (!session.is_selected(c)) return;
  const Table<T> a(is_a ? shape.depth : shape.num_rows, is_a ? shape.num_rows : shape.depth);
  const Table<T> b(is_b ? shape.num_columns : shape.depth, is_b ? shape.depth : shape.num_columns);
  const Table<T> out(shape.num_rows, shape.num_columns);
  const Product<T> product{view(b, is_b), out.view(), false};
  const int64_t multiply_adds = shape.num_rows * shape.depth * shape.num_columns;
  session.time(
      c, flops(multiply_adds),
      {kernel([&] { KernelGemm<T>().multiply(view(a, is_a), product); }), multiply_add_bound<T>(multiply_adds)});
}

const Registration registration([](Session& session) {
  for (const ProductShape& shape : kProductShapes) {
    for (const Transposed transposed : {Transposed::none, Transposed::a, Transposed::b}) {
      benchmark<double>(session, shape, transposed);
      benchmark<float>(session, shape, transposed);
      benchmark<BFloat16>(session, shape, transposed);
      benchmark<Float16>(session, shape, transposed);
    }
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
