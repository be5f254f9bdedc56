// Eigen's matrix products, compiled once for all tests.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/product/gemm.h"

namespace maxmoe {

// Eigen's product in the accumulator's type, as an independent Gemm for the kernels under test; the instance that all
// tests of a type share. It reports that its bits depend on the tiles, so that these tests also cover a tiling that
// does not depend on the threads.
template <class T>
const Gemm<T>& test_gemm();

// The product [rows, depth] x [depth, columns] of row-major matrices in float64.
std::vector<double> eigen_product(const std::vector<double>& a, const std::vector<double>& b, int64_t rows,
                                  int64_t depth, int64_t columns);

}  // namespace maxmoe
