#include "eigen_product.h"

#include <Eigen/Core>

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

template <class T, int kOrder>
using Map = Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, kOrder>, 0, Eigen::OuterStride<>>;
template <class T, int kOrder>
using ConstMap = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, kOrder>, 0, Eigen::OuterStride<>>;

template <class T>
ConstMap<T, Eigen::RowMajor> row_major(ConstMatrixView<T> m) {
  return {m.data, m.rows, m.columns, Eigen::OuterStride<>(m.row_stride)};
}
template <class T>
ConstMap<T, Eigen::ColMajor> column_major(ConstMatrixView<T> m) {
  return {m.data, m.rows, m.columns, Eigen::OuterStride<>(m.column_stride)};
}

}  // namespace

template <class T>
void eigen_product(const EigenProduct<T>& p, const Executor& /*executor*/) {
  Map<T, Eigen::RowMajor> c(p.c.data, p.c.rows, p.c.columns, Eigen::OuterStride<>(p.c.row_stride));
  if (p.a.column_stride != 1) {
    c.noalias() = column_major(p.a) * row_major(p.b);
  } else if (p.b.column_stride != 1) {
    c.noalias() = row_major(p.a) * column_major(p.b);
  } else {
    c.noalias() = row_major(p.a) * row_major(p.b);
  }
}

template void eigen_product<float>(const EigenProduct<float>&, const Executor&);
template void eigen_product<double>(const EigenProduct<double>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
