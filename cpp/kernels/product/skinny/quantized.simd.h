// The skinny product with quantized values that run along the inner dimension, multiplied as they are decoded: to pairs
// of bfloat16 (vnni.simd.cpp), or to floats (float_product.simd.cpp). With all decoders and numbers of rows these take
// long to compile, hence separate files.
#pragma once

#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A product with quantized values that are multiplied as they are decoded, without being stored.
template <class Element>
struct ProductInPlace {
  const Element* a;  // rows of A, as in SkinnyRows
  int64_t num_rows;
  const QuantizedMatrix& codes;
  const QuantizedMatrix& next_codes;  // b of the next product; without data if that b is not quantized
  MatrixView<float> sums;             // all columns; their number is a multiple of NR
  bool accumulate;
};

#if MAXMOE_DECODES_PAIRS
// Largest number of rows for which pairs are multiplied as they are decoded: 2 accumulators per row, the quantized
// values and the scales fit into the registers. Pairs of more rows are multiplied faster with packed blocks of B.
constexpr int kMaxVnniRows = 8;

using VnniProduct = ProductInPlace<BFloat16Pair>;

// Computes the sums of some columns from `column` on, a multiple of NR. Returns their number, 0 if no decoder has the
// bits of the definition.
int64_t multiply_vnni(const VnniProduct& p, int64_t column);
#endif

// Maximum number of rows that are multiplied with floats. With more, decoding is a small part of the time.
constexpr int64_t kMaxRowsOfWords = 6;

using FloatProduct = ProductInPlace<float>;  // with a single group of rows of A

// Whether the quantized values of `m` are multiplied as floats if the type of the product is T.
template <class T>
bool multiplies_words(const QuantizedMatrix& m);

// Computes the sums of NR columns from `column` on. Returns false, and computes nothing, if the result would not have
// the bits of the definition: E4M3 has a NaN, or a scale is too large.
template <class T>
bool multiply_words_of_panel(const FloatProduct& p, int64_t column);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
