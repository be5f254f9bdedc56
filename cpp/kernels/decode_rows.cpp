// Rows of codes to rows of numbers. Codes that have one scale are a run. 16-bit numbers of 4-bit codes, and bfloat16 of
// E4M3, are looked up in tables of the 16 numbers of a run; otherwise codes become floats, which are scaled and
// rounded.
#include "decode_rows.h"

#include <cmath>

#include "decode_tables.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Codes of a row that have one scale and zero point.
struct Run {
  const uint8_t* codes;
  int64_t count;
  float scale;
  float zero;
};

// The value of a code.
MAXMOE_INLINE float value_of(const QuantizedMatrix& m, uint8_t code) {
  if (m.codes == Codes::int8) return static_cast<float>(static_cast<int8_t>(code));
  if (m.codes == Codes::e4m3) return code < 128 ? kE4M3.values[code] : -kE4M3.values[code - 128];
  return table_of(m.codes, m.zeros != nullptr).values[code];
}

// Decodes the codes of a run from number `begin` on, one by one.
template <class T>
void decode_each(const QuantizedMatrix& m, Run run, int64_t begin, T* out) {
  const bool is_byte = bits_per_code(m.codes) == 8;
  for (int64_t i = begin; i < run.count; ++i) {
    const uint8_t byte = run.codes[is_byte ? i : i / 2];
    const bool is_in_high_half = (i % 2 == 1) != is_high_first(m.codes);
    const int code = is_byte ? byte : byte >> (is_in_high_half ? 4 : 0) & 0xf;
    const float value = (value_of(m, static_cast<uint8_t>(code)) - run.zero) * run.scale;
    if constexpr (std::is_same_v<T, double>) {
      out[i] = static_cast<double>(value);
    } else {
      out[i] = narrow<T>(value);
    }
  }
}

// Calls decode(run, out) for all runs of some rows. What does not change is read before: runs may be as short as 32
// codes.
template <int kBits, class T, class Decode>
MAXMOE_INLINE void for_each_run(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead,
                                const Decode& decode) {
  const int64_t bytes = m.bytes_of(columns.size());
  const ScaleType type = m.scale_type;
  const std::byte* const scales = m.scales;
  const uint8_t* const zeros = m.zeros;
  const int64_t whole = int64_t{1} << m.log2_columns_per_scale;
  const int64_t first = whole - ((m.first_column + columns.begin) & (whole - 1));
  for (int64_t r = 0; r < rows.size(); ++r) {
    const uint8_t* codes = m.code(rows.begin + r, columns.begin);
    for (int64_t i = 0; ahead != 0 && i < bytes; i += kCacheLineBytes) __builtin_prefetch(codes + i + ahead, 0, 2);
    int64_t index = m.scale_index(rows.begin + r, columns.begin);
    T* target = out.row(r);
    int64_t left = columns.size();
    for (int64_t count = at_most(first, left); left > 0; count = at_most(whole, left)) {
      const float zero = zeros == nullptr ? 0.0F : static_cast<float>(zeros[index]);
      decode(Run{codes, count, read_scale(type, scales, index), zero}, target);
      codes += count * kBits / 8;
      target += count;
      left -= count;
      ++index;
    }
  }
}

#if defined(__AVX2__)

// Number of codes that are decoded at a time.
constexpr int64_t kCodesAtATime = 32;

// 32 floats.
struct Floats32 {
  __m256 of[4];
};

// The floats of 8-bit codes.
MAXMOE_INLINE Floats32 floats_of_int8(const uint8_t* source) {
  Floats32 floats;
  for (int i = 0; i < 4; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source + int64_t{8} * i));
    floats.of[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  return floats;
}

// E4M3 as float16, whose exponent bias is 8 larger. The conversion to float takes subnormal numbers as they are.
MAXMOE_INLINE Floats32 floats_of_e4m3(const uint8_t* source) {
  Floats32 floats;
  for (int i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + int64_t{16} * i));
    const __m256i shifted = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m256i largest = _mm256_set1_epi16(0x3f80);
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, largest), largest);
    // 0x3f80 becomes 0x7e00, a NaN.
    const __m256i result = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    floats.of[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(result));
    floats.of[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(result, 1));
  }
  for (__m256& x : floats.of) x = _mm256_mul_ps(x, _mm256_set1_ps(256.0F));
  return floats;
}

// The codes of 16 bytes as bytes: those of bytes 0 to 7 in the lower half, those of the others in the upper half.
template <bool kIsHighFirst>
MAXMOE_INLINE __m256i bytes_of_codes(__m128i bytes) {
  const __m256i words = _mm256_cvtepu8_epi16(bytes);
  const __m256i codes = kIsHighFirst ? _mm256_or_si256(_mm256_srli_epi16(words, 4), _mm256_slli_epi16(words, 8))
                                     : _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
  return _mm256_and_si256(codes, _mm256_set1_epi8(0xf));
}

// The floats of 4-bit codes: their four bytes are looked up.
template <bool kIsHighFirst>
class FloatTable {
 public:
  explicit FloatTable(const CodeTable& table) {
    for (int byte = 0; byte < 4; ++byte) {
      alignas(16) uint8_t bytes[16];
      for (size_t i = 0; i < 16; ++i) {
        bytes[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(table.values[i]) >> 8 * byte);
      }
      const auto* source = reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(bytes));
      tables_[byte] = _mm256_broadcastsi128_si256(_mm_load_si128(source));
    }
  }

  MAXMOE_INLINE Floats32 floats(const uint8_t* source) const {
    // Codes 0 to 3 of each 8 are in the lower half, the others in the upper one: unpacking takes 4 codes of each.
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    const __m256i codes = bytes_of_codes<kIsHighFirst>(_mm_shuffle_epi8(bytes, order));
    const auto byte = [&](int i) MAXMOE_INLINE_LAMBDA { return _mm256_shuffle_epi8(tables_[i], codes); };
    const __m256i low[2] = {_mm256_unpacklo_epi8(byte(0), byte(1)), _mm256_unpackhi_epi8(byte(0), byte(1))};
    const __m256i high[2] = {_mm256_unpacklo_epi8(byte(2), byte(3)), _mm256_unpackhi_epi8(byte(2), byte(3))};
    return {{_mm256_castsi256_ps(_mm256_unpacklo_epi16(low[0], high[0])),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[0], high[0])),
             _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[1], high[1])),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[1], high[1]))}};
  }

 private:
  __m256i tables_[4];
};

// 16 floats that are no NaN, but for the one of E4M3, as bfloat16: to nearest, ties to even.
MAXMOE_INLINE __m256i to_bfloat16(__m256 first, __m256 second) {
  const auto rounded = [](__m256 x) MAXMOE_INLINE_LAMBDA {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    return _mm256_srli_epi32(sum, 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(first), rounded(second)), 0xd8);
}

template <class T>
MAXMOE_INLINE void store_floats(const Floats32& floats, T* out) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    auto* const target = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(target, to_bfloat16(floats.of[0], floats.of[1]));
    _mm256_storeu_si256(target + 1, to_bfloat16(floats.of[2], floats.of[3]));
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    T* const target = out + int64_t{8} * i;
    if constexpr (std::is_same_v<T, double>) {
      _mm256_storeu_pd(target, _mm256_cvtps_pd(_mm256_castps256_ps128(floats.of[i])));
      _mm256_storeu_pd(target + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats.of[i], 1)));
    } else if constexpr (std::is_same_v<T, Float16>) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(floats.of[i], _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (std::is_same_v<T, float>) {
      _mm256_storeu_ps(target, floats.of[i]);
    }
  }
}

// Decodes as many codes of a run as fill vectors, with floats_of(codes, i) of codes i to i + 31. Returns their number.
template <class T, class FloatsOf>
MAXMOE_INLINE int64_t decode_floats(const Run& run, T* out, const FloatsOf& floats_of) {
  if (!std::isfinite(run.scale)) return 0;
  const __m256 scale = _mm256_set1_ps(run.scale);
  const __m256 zero = _mm256_set1_ps(run.zero);
  int64_t i = 0;
  for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
    Floats32 floats = floats_of(run.codes, i);
#pragma GCC unroll 4
    for (__m256& x : floats.of) {
      if (run.zero != 0.0F) x = _mm256_sub_ps(x, zero);
      x = _mm256_mul_ps(x, scale);
    }
    store_floats(floats, out + i);
  }
  return i;
}

// 16 numbers of 16 bits, which are looked up by bytes.
class HalfTable {
 public:
  MAXMOE_INLINE explicit HalfTable(__m256i halves) {
    const __m256i low = _mm256_and_si256(halves, _mm256_set1_epi16(0xff));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, _mm256_srli_epi16(halves, 8)), 0xd8);
    low_ = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high_ = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }

  struct Halves32 {
    __m256i first;
    __m256i second;
  };
  // Of the lower 8 bytes of both halves of `index`, then of the others.
  MAXMOE_INLINE Halves32 look_up(__m256i index) const {
    const __m256i low = _mm256_shuffle_epi8(low_, index);
    const __m256i high = _mm256_shuffle_epi8(high_, index);
    return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
  }

 private:
  __m256i low_;
  __m256i high_;
};

MAXMOE_INLINE void store_halves(HalfTable::Halves32 halves, void* out) {
  _mm256_storeu_si256(static_cast<__m256i*>(out), halves.first);
  _mm256_storeu_si256(static_cast<__m256i*>(out) + 1, halves.second);
}

// 16 values, from which the table of a run is computed.
template <class T>
class RunTable {
 public:
  explicit RunTable(const float* values) {
    constexpr bool kIsSplit = std::is_same_v<T, BFloat16> && kLanes<float> == 8;
    alignas(64) float ordered[16];
    for (int i = 0; i < 16; ++i) ordered[i] = values[kIsSplit ? i % 8 * 2 + i / 8 : i];
    std::memcpy(values_, ordered, sizeof(ordered));
  }

  // (value - zero) * scale, rounded.
  MAXMOE_INLINE __m256i halves(float scale, float zero) const {
    const auto scaled = [&](int i) MAXMOE_INLINE_LAMBDA { return (values_[i] - zero) * scale; };
#if defined(__AVX512F__)
    constexpr bool kIsFloat16 = std::is_same_v<T, Float16>;
    return kIsFloat16 ? _mm512_cvtps_ph(scaled(0), _MM_FROUND_TO_NEAREST_INT)
                      : _mm512_cvtepi32_epi16(std::bit_cast<__m512i>(round_to_bfloat16(scaled(0)) >> 16));
#else
    if constexpr (std::is_same_v<T, Float16>) {
      return _mm256_set_m128i(_mm256_cvtps_ph(scaled(1), _MM_FROUND_TO_NEAREST_INT),
                              _mm256_cvtps_ph(scaled(0), _MM_FROUND_TO_NEAREST_INT));
    } else {
      return std::bit_cast<__m256i>(round_to_bfloat16(VectorX2<float>{scaled(0), scaled(1)}));
    }
#endif
  }

 private:
  Vector<float> values_[16 / kLanes<float>];
};

// Whether no product of a value and a scale is subnormal or infinite: values are between 2^-9 and 2^9.
MAXMOE_INLINE bool is_ordinary(float scale) {
  return __builtin_fabsf(scale) >= 0x1p-100F && __builtin_fabsf(scale) <= 0x1p100F;
}

// Decodes 4-bit codes of a run to 16-bit numbers.
template <bool kIsHighFirst, class T>
MAXMOE_INLINE int64_t decode_halves(const Run& run, __m256i halves, T* out) {
  const HalfTable table(halves);
  int64_t i = 0;
  for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run.codes + i / 2));
    // Bytes 4 to 7 and 8 to 11 change places, since unpacking takes 8 codes of each half.
    store_halves(table.look_up(bytes_of_codes<kIsHighFirst>(_mm_shuffle_epi32(bytes, 0xd8))), out + i);
  }
  return i;
}

template <bool kIsHighFirst, class T>
void decode_rows_of_4_bits(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
  const CodeTable& values = table_of(m.codes, m.zeros != nullptr);
  if constexpr (sizeof(T) == 2) {
    const RunTable<T> table(values.values.data());
    return for_each_run<4>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      const int64_t decoded = decode_halves<kIsHighFirst>(run, table.halves(run.scale, run.zero), target);
      if (decoded < run.count) decode_each(m, run, decoded, target);
    });
  } else {
    const FloatTable<kIsHighFirst> table(values);
    for_each_run<4>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      const int64_t decoded = decode_floats(run, target, [&](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA {
        return table.floats(codes + i / 2);
      });
      if (decoded < run.count) decode_each(m, run, decoded, target);
    });
  }
}

// E4M3 to bfloat16. A code is m / 8 + 1 times a power of two; the numbers of m are rounded alike for each power, unless
// one is subnormal or infinite. Entries 0 to 7 of the table are the numbers of codes 0 to 7, the subnormal ones,
// entries 8 to 15 those of codes 8 to 15. The exponents of the others are raised by their own exponent less 1.
class E4M3Halves {
 public:
  E4M3Halves() : table_(kE4M3.values) {}

  MAXMOE_INLINE int64_t decode(const Run& run, BFloat16* out) const {
    if (!is_ordinary(run.scale)) return 0;
    const HalfTable table(table_.halves(run.scale, 0.0F));
    const auto bytes = [](int value) { return _mm256_set1_epi8(static_cast<int8_t>(value)); };
    int64_t i = 0;
    for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
      const __m256i source = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.codes + i));
      const __m256i codes = _mm256_permute4x64_epi64(source, 0xd8);  // unpacking takes 8 codes of each half
      const __m256i magnitudes = _mm256_and_si256(codes, bytes(0x7f));
      if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, bytes(0x7f))) != 0) break;  // a NaN
      // Codes above 15 have the index of the one with the same lower 3 bits.
      const __m256i index = _mm256_min_epu8(magnitudes, _mm256_or_si256(_mm256_and_si256(codes, bytes(7)), bytes(8)));
      const __m256i raised = _mm256_sub_epi8(magnitudes, index);  // 8 times what the exponent is raised by
      const __m256i signs = _mm256_and_si256(codes, bytes(0x80));
      // The sum is to wrap around: adding 0x8000 changes the sign.
      const auto sum = [&](__m256i numbers, __m256i raised_by, __m256i sign) MAXMOE_INLINE_LAMBDA {
        return _mm256_add_epi16(numbers, _mm256_or_si256(_mm256_slli_epi16(raised_by, 4), sign));
      };
      const auto numbers = table.look_up(index);
      const __m256i zero = _mm256_setzero_si256();
      store_halves({sum(numbers.first, _mm256_unpacklo_epi8(raised, zero), _mm256_unpacklo_epi8(zero, signs)),
                    sum(numbers.second, _mm256_unpackhi_epi8(raised, zero), _mm256_unpackhi_epi8(zero, signs))},
                   out + i);
    }
    return i;
  }

 private:
  RunTable<BFloat16> table_;
};

template <class T>
void decode_rows_of_8_bits(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
  [[maybe_unused]] const E4M3Halves halves;
  for_each_run<8>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
    int64_t decoded = 0;
    if (m.codes == Codes::int8) {
      decoded = decode_floats(
          run, target, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA { return floats_of_int8(codes + i); });
    } else {
      if constexpr (std::is_same_v<T, BFloat16>) decoded = halves.decode(run, target);
      if (decoded == 0) {
        decoded = decode_floats(run, target, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA {
          return floats_of_e4m3(codes + i);
        });
      }
    }
    if (decoded < run.count) decode_each(m, run, decoded, target);
  });
}

#endif

}  // namespace

template <class T>
void decode_rows(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
#if defined(__AVX2__)
  if (bits_per_code(m.codes) == 8) return decode_rows_of_8_bits(m, rows, columns, out, ahead);
  if (is_high_first(m.codes)) return decode_rows_of_4_bits<true>(m, rows, columns, out, ahead);
  decode_rows_of_4_bits<false>(m, rows, columns, out, ahead);
#else
  const auto decode = [&](const Run& run, T* target) { decode_each(m, run, 0, target); };
  bits_per_code(m.codes) == 8 ? for_each_run<8>(m, rows, columns, out, ahead, decode)
                              : for_each_run<4>(m, rows, columns, out, ahead, decode);
#endif
}

#define MAXMOE_INSTANTIATE_FOR(T) \
  template void decode_rows(const QuantizedMatrix&, Range, Range, MatrixView<T>, int64_t);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
