#include "kernels/product/linear.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

// The logits of a router: 16-bit matrices, with sums and result in float32.
const Registration registration([](Session& session) {
  for_experts(session, "linear", [&]<class T>(const Case& c, const ExpertsShape& shape) {
    constexpr Dtype kDtype = std::is_same_v<T, float> ? Dtype::float32 : Dtype::bfloat16;
    const Table<T> x(shape.num_tokens, shape.hidden_size);
    const Table<T> weight(shape.num_experts, shape.hidden_size);
    const Table<float> logits(shape.num_tokens, shape.num_experts);
    const auto any_matrix = []<class U>(const Table<U>& m, Dtype dtype) {
      const ConstMatrixView<U> view = m.read();
      return AnyMatrix<const void>{view.data, dtype, view.rows, view.columns, view.row_stride, view.column_stride};
    };
    const MatrixView<float> out = logits.view();
    const KernelGemm<float> gemm;
    const Linear<float> product{.x = any_matrix(x, kDtype),
                                .weight = any_matrix(weight, kDtype),
                                .bias = nullptr,
                                .gemm = &gemm,
                                .out = {out.data, Dtype::float32, out.rows, out.columns, out.row_stride}};
    const DenseProducts<float> dense(1, x.read().rows, x.read().columns, weight.read().rows);
    session.time(c, flops(x.read().rows * x.read().columns * weight.read().rows),
                 {kernel([&] { linear(product, session.threads()); }), dense.bound(session.threads())});
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
