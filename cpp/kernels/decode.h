// Codes of quantized matrices to vectors of float. Only for the .cpp files that are compiled per instruction set.
//
// A decoder has the lookup of one kind of codes. It reads the low bits of 32-bit lanes and ignores the others, so that
// the codes that share a word are reached by shifts alone.
#pragma once

#include "decode_tables.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A lookup in a table of 16 values.
class TableDecoder {
 public:
  static constexpr int kBits = 4;

  explicit TableDecoder(const CodeTable& table) {
    for (int i = 0; i < kVectors; ++i) table_[i] = load_vector(table.values.data() + int64_t{i} * kLanes<float>);
  }

  MAXMOE_INLINE Vector<float> operator()(Vector<uint32_t> codes) const {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(std::bit_cast<__m512i>(codes), table_[0]);
#elif defined(__AVX2__)
    const auto index = std::bit_cast<__m256i>(codes);
    const __m256 low = _mm256_permutevar8x32_ps(table_[0], index);
    const __m256 high = _mm256_permutevar8x32_ps(table_[1], index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));  // by bit 3
#else
    Vector<float> values;
    for (int i = 0; i < kLanes<float>; ++i) {
      const uint32_t code = codes[i] & 0xfU;
      values[i] = table_[code / kLanes<float>][code % kLanes<float>];
    }
    return values;
#endif
  }

 private:
  static constexpr int kVectors = 16 / kLanes<float>;
  Vector<float> table_[kVectors];
};

struct Int8Decoder {
  static constexpr int kBits = 8;
  MAXMOE_INLINE Vector<float> operator()(Vector<uint32_t> codes) const {
    using Signed = VectorOf<int32_t, kVectorBytes>::type;
    return __builtin_convertvector(std::bit_cast<Signed>(codes << 24) >> 24, Vector<float>);
  }
};

struct E4M3Decoder {
  static constexpr int kBits = 8;
  MAXMOE_INLINE Vector<float> operator()(Vector<uint32_t> codes) const {
    const Vector<uint32_t> magnitude = codes & 0x7fU;
    // The exponent bias of float is 120 larger. A subnormal gets the exponent of the smallest normal number and a
    // leading one, which is then subtracted: no subnormal float appears, which a thread may flush to zero.
    const Vector<uint32_t> is_subnormal = magnitude < 8U;  // all bits, or none
    const auto biased = std::bit_cast<Vector<float>>((magnitude << 20) + (120U << 23) + (is_subnormal & (1U << 23)));
    const auto leading_one = std::bit_cast<Vector<float>>(is_subnormal & std::bit_cast<uint32_t>(0x1p-6F));
    const auto value = std::bit_cast<Vector<uint32_t>>(biased - leading_one);
    const Vector<uint32_t> is_nan = magnitude == 0x7fU;
    return std::bit_cast<Vector<float>>(value | (codes & 0x80U) << 24 | (is_nan & 0x7fc00000U));
  }
};

// Calls body(decoder) with the decoder of the codes of a matrix.
template <class Body>
MAXMOE_INLINE void with_decoder(const QuantizedMatrix& m, const Body& body) {
  switch (m.codes) {
    case Codes::int8:
      return body(Int8Decoder());
    case Codes::e4m3:
      return body(E4M3Decoder());
    default:
      return body(TableDecoder(table_of(m.codes, m.zeros != nullptr)));
  }
}

// Whether the first of two 4-bit codes is in the high half of their byte.
MAXMOE_INLINE bool is_high_first(Codes codes) {
  return codes == Codes::nf4;
}

// Exchanges the halves of all bytes, so that the first code is in the low half.
template <class V>
MAXMOE_INLINE V swapped_halves(V bytes) {
  return (bytes & 0x0f) << 4 | bytes >> 4;
}

// Rounded to T and widened again.
template <class T>
MAXMOE_INLINE Vector<float> rounded(Vector<float> values) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return std::bit_cast<Vector<float>>(round_to_bfloat16(values) & 0xffff0000U);
  } else if constexpr (std::is_same_v<T, Float16>) {
    Float16 part[kLanes<float>];
    store_narrowed<Float16>(static_cast<Float16*>(part), values);
    return load_vector(static_cast<const Float16*>(part));
  } else {
    return values;
  }
}

// The bytes of codes that are next to each other in a row, one code per byte.
template <int kBytes>
using Bytes = VectorOf<uint8_t, kBytes>::type;

template <class V, int... kLane>
MAXMOE_INLINE auto interleaved(V first, V second, std::integer_sequence<int, kLane...> /*lanes*/) {
  constexpr int kCount = sizeof...(kLane) / 2;
  return __builtin_shufflevector(first, second, (kLane / 2 + kLane % 2 * kCount)...);
}

// 2 * kLanes<float> consecutive codes of a row as 32-bit lanes, in the order of VectorX2: `is_split` puts even columns
// first. Bits above a code are undefined.
struct CodesX2 {
  Vector<uint32_t> first;
  Vector<uint32_t> second;
};

template <int kBits, bool kIsSplit>
MAXMOE_INLINE CodesX2 load_codes_x2(const uint8_t* source, bool swaps_halves) {
  constexpr int kCount = kLanes<float>;
  if constexpr (kBits == 4) {
    Bytes<kCount> bytes;
    std::memcpy(&bytes, source, sizeof(bytes));
    if (swaps_halves) bytes = swapped_halves(bytes);
    if constexpr (kIsSplit) {
      const auto lanes = __builtin_convertvector(bytes, Vector<uint32_t>);
      return {lanes, lanes >> 4};
    } else {
      const auto codes = interleaved(bytes, bytes >> 4, std::make_integer_sequence<int, 2 * kCount>());
      Bytes<kCount> halves[2];
      std::memcpy(halves, &codes, sizeof(codes));
      return {__builtin_convertvector(halves[0], Vector<uint32_t>),
              __builtin_convertvector(halves[1], Vector<uint32_t>)};
    }
  } else if constexpr (kIsSplit) {
    HalfVector pairs;
    std::memcpy(&pairs, source, sizeof(pairs));
    const auto lanes = __builtin_convertvector(pairs, Vector<uint32_t>);
    return {lanes, lanes >> 8};
  } else {
    Bytes<kCount> halves[2];
    std::memcpy(halves, source, sizeof(halves));
    return {__builtin_convertvector(halves[0], Vector<uint32_t>), __builtin_convertvector(halves[1], Vector<uint32_t>)};
  }
}

// The number of columns that decode_x2 decodes.
constexpr int64_t kDecodedColumns = int64_t{2} * kLanes<float>;

// Decodes kDecodedColumns elements of a row from `column` on, a multiple of kDecodedColumns, in the order of VectorX2
// of T. They have one scale. Elements past the last column are zeros.
template <class T, class Decoder>
MAXMOE_INLINE VectorX2<float> decode_x2(const QuantizedMatrix& m, const Decoder& decoder, int64_t row, int64_t column) {
  constexpr bool kIsSplit = std::is_same_v<T, BFloat16>;
  const uint8_t* source = m.code(row, column);
  const int64_t count = at_most(m.columns - column, kDecodedColumns);
  uint8_t part[kDecodedColumns];
  if (count < kDecodedColumns) {
    std::memset(part, 0, sizeof(part));
    copy_row(source, static_cast<uint8_t*>(part), m.bytes_of(count));
    source = part;
  }
  const CodesX2 codes = load_codes_x2<Decoder::kBits, kIsSplit>(source, is_high_first(m.codes));
  const int64_t block = m.scale_index(row, column);
  const float scale = m.scale(block);
  VectorX2<float> values{decoder(codes.first), decoder(codes.second)};
  if (m.zeros != nullptr) {
    const float zero = m.zero(block);
    values = {values.first - zero, values.second - zero};
  }
  values = {values.first * scale, values.second * scale};
  if (count < kDecodedColumns) {
    for (int64_t i = count; i < kDecodedColumns; ++i) {
      const int64_t lane = kIsSplit ? i / 2 : i % kLanes<float>;
      (kIsSplit ? i % 2 == 1 : i >= kLanes<float>) ? values.second[lane] = 0 : values.first[lane] = 0;
    }
  }
  return values;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
