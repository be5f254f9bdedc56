// Codes that run across the inner dimension to pairs of bfloat16: a step is 32 columns of rows d and d + 1. Only for
// the .cpp files that are compiled per instruction set.
#pragma once

#include "byte_tables.h"
#include "code_columns.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether all scales of rows and columns of `m` can be multiplied with AVX512-BF16.
MAXMOE_INLINE bool have_ordinary_scales(const QuantizedMatrix& m, Range rows, Range columns) {
  if (rows.size() <= 0 || columns.size() <= 0) return true;
  const int64_t last = m.scale_index(rows.end - 1, columns.end - 1);
  const int64_t width = m.scale_index(rows.begin, columns.end - 1) - m.scale_index(rows.begin, columns.begin);
  for (int64_t first = m.scale_index(rows.begin, columns.begin); first + width <= last; first += m.scales_per_row) {
    for (int64_t i = 0; i <= width; ++i) {
      if (!is_ordinary(m.scale(first + i))) return false;
    }
  }
  return true;
}

// The pairs of a step, in the order of VectorX2.
struct PairsX2 {
  __m512i first;   // even columns
  __m512i second;  // odd columns
};

// 4-bit codes: for each row, the 16 values times its scale are one half of a table.
class TableRowPairs {
 public:
  static bool fits(const QuantizedMatrix& m, Range /*rows*/) { return bits_per_code(m.codes) == 4; }

  explicit TableRowPairs(const QuantizedMatrix& m)
      : m_(m), table_(_mm512_load_ps(table_of(m.codes, m.zeros != nullptr).values.data())) {}

  // Row d + 1 counts as zeros if it is not below `end`.
  MAXMOE_INLINE PairsX2 decode(int64_t d, int64_t end, int64_t column) {
    const bool has_second = d + 1 < end;
    const int64_t second = has_second ? d + 1 : d;
    const __m512i upper = load(d, column);
    const __m512i lower = load(second, column);
    const __m512 of_first = scaled(m_.scale_index(d, column), true);
    const __m512 of_second = scaled(m_.scale_index(second, column), has_second);
    const auto table = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(of_second, of_first));
    const __m512i both = _mm512_or_si512(upper, _mm512_slli_epi32(lower, 16));
    const auto look_up = [&](__m512i codes) {
      // The codes of the second row are looked up in the upper half: (codes & 0x000f000f) | 0x00100000.
      const __m512i index =
          _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x00100000), 0xea);
      return _mm512_permutexvar_epi16(index, table);
    };
    const __m512i low = look_up(both);
    const __m512i high = look_up(_mm512_srli_epi32(both, 4));
    return is_high_first(m_.codes) ? PairsX2{high, low} : PairsX2{low, high};
  }

 private:
  MAXMOE_INLINE __m512i load(int64_t row, int64_t column) const {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(m_.code(row, column))));
  }
  MAXMOE_INLINE __m512 scaled(int64_t index, bool exists) const {
    const __m512 values = m_.zeros == nullptr ? table_ : _mm512_sub_ps(table_, _mm512_set1_ps(m_.zero(index)));
    return _mm512_mul_ps(values, _mm512_set1_ps(exists ? m_.scale(index) : 0.0F));
  }

  const QuantizedMatrix& m_;
  __m512 table_;
};

// E4M3 where both rows of a step have the same scales.
class E4M3RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m, Range rows) {
    return m.codes == Codes::e4m3 && m.log2_rows_per_scale > 0 && (m.first_row + rows.begin) % 2 == 0;
  }

  explicit E4M3RowPairs(const QuantizedMatrix& m) : m_(m), table_(0.0F) {}

  MAXMOE_INLINE PairsX2 decode(int64_t d, int64_t end, int64_t column) {
    const int64_t index = m_.scale_index(d, column);
    if (index != index_) {
      index_ = index;
      table_ = E4M3Table(m_.scale(index));
    }
    const __m512i upper = load(d, column);
    const __m512i lower = d + 1 < end ? load(d + 1, column) : _mm512_setzero_si512();
    const __m512i both = _mm512_or_si512(upper, _mm512_slli_epi32(lower, 16));
    const ValueBytes values = table_(both);
    return {values.pairs<0, 2>(), values.pairs<1, 3>()};
  }

 private:
  MAXMOE_INLINE __m512i load(int64_t row, int64_t column) const {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(m_.code(row, column))));
  }

  const QuantizedMatrix& m_;
  E4M3Table table_;
  int64_t index_ = -1;
};

// 8-bit codes with any scales.
template <Codes codes>
class ByteRowPairs {
 public:
  static bool fits(const QuantizedMatrix& m, Range /*rows*/) { return m.codes == codes; }

  explicit ByteRowPairs(const QuantizedMatrix& m) : m_(m) {}

  MAXMOE_INLINE PairsX2 decode(int64_t d, int64_t end, int64_t column) const {
    const bool has_second = d + 1 < end;
    const int64_t second = has_second ? d + 1 : d;
    const __m512i both = _mm512_or_si512(load(d, column), _mm512_slli_epi32(load(second, column), 16));
    const ValueBytes values = table_(both);
    const __m512 of_first = _mm512_set1_ps(m_.scale(m_.scale_index(d, column)));
    const __m512 of_second = _mm512_set1_ps(has_second ? m_.scale(m_.scale_index(second, column)) : 0.0F);
    return {scaled_pairs(values.pairs<0, 2>(), of_first, of_second),
            scaled_pairs(values.pairs<1, 3>(), of_first, of_second)};
  }

 private:
  MAXMOE_INLINE __m512i load(int64_t row, int64_t column) const {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(m_.code(row, column))));
  }

  const QuantizedMatrix& m_;
  ByteTable<codes> table_;
};

// Calls body(pairs) with an object of the class that fits; returns false if there is none.
template <class Body>
MAXMOE_INLINE bool with_row_pairs(const QuantizedMatrix& m, Range rows, const Body& body) {
  const auto try_class = [&]<class Pairs> {
    if (!Pairs::fits(m, rows)) return false;
    Pairs pairs(m);
    body(pairs);
    return true;
  };
  return try_class.template operator()<TableRowPairs>() || try_class.template operator()<E4M3RowPairs>() ||
         try_class.template operator()<ByteRowPairs<Codes::e4m3>>() ||
         try_class.template operator()<ByteRowPairs<Codes::int8>>();
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
