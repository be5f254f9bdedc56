// The skinny product of A with 4-bit quantized values: vnni_product.simd.h.
#include "kernels/product/skinny/vnni_product.simd.h"

#if MAXMOE_DECODES_PAIRS
#include "kernels/product/skinny/multiply_lines.simd.h"
#include "kernels/quantized/column_tables.simd.h"
#include "kernels/quantized/e2m1.simd.h"
#endif

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS
namespace {

// Largest number of rows with four vectors of columns: the accumulators of more rows take the registers.
constexpr int kMaxRowsOfFourVectors = 2;

// Whether sums of the vectors can be scaled.
template <int kVectors>
bool fit_unscaled(const VnniProduct& p, const ForVectors<CodeColumns, kVectors>& columns, int64_t column) {
  if (p.codes.codes != Codes::e2m1) return false;
  Exponents of_sums;
  for (int64_t r = 0; r < p.num_rows && p.accumulate; ++r) {
    const Exponents of_row = exponents_of_floats(p.sums.row(r) + column, kVectors * kLanes<float>);
    of_sums.add(of_row.min, of_row.max);
  }
  return all_fit(columns, [&](const CodeColumns& c) { return UnscaledE2M1::fits(c, p.of_a, of_sums); });
}

}  // namespace

int64_t multiply_vnni_of_4_bits(const VnniProduct& p, int64_t column) {
  if (p.num_rows <= kMaxRowsOfFourVectors && column + 2 * kNR<float> <= p.sums.columns) {
    const auto columns = vectors_at<4>(p, column);
    if (fit_unscaled(p, columns, column)) {
      return multiply_columns<UnscaledE2M1, kMaxRowsOfFourVectors>(p, columns, column);
    }
  }
  const auto columns = vectors_at<2>(p, column);
  if (fit_unscaled(p, columns, column)) return multiply_columns<UnscaledE2M1, kMaxVnniRows>(p, columns, column);
  if (all_fit(columns, ColumnTables::fits)) return multiply_columns<ColumnTables, kMaxVnniRows>(p, columns, column);
  return 0;
}
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
