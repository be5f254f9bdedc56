#include "ops/operators.h"
#include "python/define.h"

namespace maxmoe::python {
namespace {

at::Tensor gmm(const at::Tensor& lhs, const GivenProjection& rhs, const at::Tensor& group_sizes, int64_t group_offset) {
  const ops::Projection projection = rhs.read(lhs.scalar_type());
  const py::gil_scoped_release released;
  return ops::gmm(lhs, projection, group_sizes, group_offset);
}

}  // namespace

void define_products(py::module_& module) {
  define<ops::linear>(module, py::arg("x"), py::arg("weight"), py::arg("bias") = py::none(),
                      py::arg("out_dtype") = py::none(), "out[t, e] = <x[t], weight[e]> + bias[e]");
  define(module, "gmm", &gmm, py::arg("lhs"), py::arg("rhs"), py::arg("group_sizes"), py::arg("group_offset") = 0,
         "out[r] = rhs_l(lhs[r])   for the rows r of group l + group_offset");
  define<ops::tgmm>(module, py::arg("lhs"), py::arg("rhs"), py::arg("group_sizes"), py::arg("num_local_groups"),
                    py::arg("group_offset") = 0,
                    "out[l] = lhs_g^T @ rhs_g   over the rows of group g = l + group_offset");
  define<ops::dequantize>(module, py::arg("codes"), py::arg("scales"), py::arg("zeros"), py::arg("row_scales"),
                          py::arg("format"), py::arg("columns"), py::arg("dtype"),
                          "Return the matrices (L, rows, columns) of codes, scales, zero points and scales of rows.");
}

}  // namespace maxmoe::python
