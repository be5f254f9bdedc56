// Rows of codes to rows of numbers, run by run: the codes of a row that have one scale. 16-bit numbers of 4-bit codes
// and bfloat16 of E4M3 are looked up in a table of the run (decoded_halves.simd.h). Otherwise codes become floats,
// which are scaled and rounded (decoded_floats.simd.h).
#include "kernels/quantized/decode_rows.simd.h"

#include "kernels/quantized/decoded_halves.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

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

// Calls decode(run, out) for all runs of the given rows and columns. Runs may be as short as 32 codes, so that pointers
// and types are read before the loops.
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

// Calls for_each_run with a function that decodes the codes of a run that fill whole vectors, and returns their number.
// The other codes are decoded one by one.
template <int kBits, class T, class Decode>
MAXMOE_INLINE void decode_runs(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead,
                               const Decode& decode) {
  for_each_run<kBits>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
    const int64_t decoded = decode(run, target);
    if (decoded < run.count) decode_each(m, run, decoded, target);
  });
}

template <bool kIsHighFirst, class T>
void decode_rows_of_4_bits(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
  const CodeTable& values = table_of(m.codes, m.zeros != nullptr);
  if constexpr (std::is_same_v<T, BFloat16> && !kIsHighFirst) {
    if (m.codes == Codes::e2m1 && m.scale_type == ScaleType::e8m0 && m.zeros == nullptr) {
      const E2M1Halves halves;
      return decode_runs<4>(m, rows, columns, out, ahead,
                            [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA { return halves.decode(run, target); });
    }
  }
  if constexpr (sizeof(T) == 2) {
    const RunTable<T> of_run(values.values.data());
    decode_runs<4>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      return decode_halves<kIsHighFirst>(run, HalfTable(of_run.halves(run.scale, run.zero)), target);
    });
  } else {
    const FloatTable<kIsHighFirst> table(values);
    decode_runs<4>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      return decode_floats(run, target, [&](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA {
        return table.floats(codes + i / 2);
      });
    });
  }
}

template <class T>
void decode_rows_of_8_bits(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
  if (m.codes == Codes::int8) {
    return decode_runs<8>(m, rows, columns, out, ahead, [](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      return decode_floats(
          run, target, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA { return floats_of_int8(codes + i); });
    });
  }
  [[maybe_unused]] const E4M3Halves halves;
  decode_runs<8>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
    int64_t decoded = 0;
    if constexpr (std::is_same_v<T, BFloat16>) decoded = halves.decode(run, target);
    if (decoded > 0) return decoded;
    return decode_floats(
        run, target, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA { return floats_of_e4m3(codes + i); });
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
