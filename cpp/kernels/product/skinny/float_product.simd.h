// The skinny product with quantized values that run along the inner dimension, decoded to floats in registers:
// skinny_product.simd.h.
//
// A cache line of quantized values of each of the NR columns of a panel is transposed in words of 32 bits, so that a
// lane holds neighbouring quantized values of its column. The quantized values of a word are decoded one after the
// other, scaled, rounded to the type of the product and multiplied. Decoded numbers are not stored: with blocks of
// decoded numbers instead 1 row took 1.3 to 3.9 times the time, 4 rows 1.1 to 2.9 (docs/concepts/kernels.md).
#pragma once

#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if defined(__AVX2__)
constexpr bool kMultipliesWords = true;
#else
constexpr bool kMultipliesWords = false;
#endif

// Maximum number of rows. With more, decoding is a small part of the time.
constexpr int64_t kMaxRowsOfWords = 6;

using FloatProduct = ProductInPlace<float>;  // with a single group of rows of A

// Whether the quantized values of `m` are multiplied in this way if the type of the product is T.
template <class T>
bool multiplies_words(const QuantizedMatrix& m);

// Computes the sums of NR columns from `column` on. Returns false, and computes nothing, if the result would not have
// the bits of the definition: E4M3 has a NaN, or a scale is too large.
template <class T>
bool multiply_words_of_panel(const FloatProduct& p, int64_t column);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
