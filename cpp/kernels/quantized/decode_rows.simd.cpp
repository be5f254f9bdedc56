// Rows of codes to rows of numbers, run by run: the codes of a row that have one scale.
#include "kernels/quantized/decode_rows.simd.h"

#include "kernels/quantized/formats.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Decodes the codes of a run from number `begin` on, one by one.
template <class Format, class T>
void decode_each(const QuantizedMatrix& m, Run run, int64_t begin, T* out) {
  const auto value_of = [&](int64_t i) {
    if constexpr (Format::kCodes.bits == 8) {
      return Format::value(run.codes[i]);
    } else {
      const bool is_in_high_half = (i % 2 == 1) != Format::kCodes.is_high_first;
      return m.values().values[run.codes[i / 2] >> (is_in_high_half ? 4 : 0) & 0xf];
    }
  };
  for (int64_t i = begin; i < run.count; ++i) {
    const float value = (value_of(i) - run.zero) * run.scale;
    if constexpr (std::is_same_v<T, double>) {
      out[i] = static_cast<double>(value);
    } else {
      out[i] = narrow<T>(value);
    }
  }
}

// Calls decode(run, out) for all runs of the given rows and columns. Runs may be as short as 16 codes, so that pointers
// and types are read before the loops.
template <int kBits, class T, class Decode>
MAXMOE_INLINE void for_each_run(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead,
                                const Decode& decode) {
  const int64_t bytes = m.bytes_of(columns.size());
  const ScaleType type = m.scale_type;
  const std::byte* const scales = m.scales;
  const uint8_t* const zeros = m.zeros;
  const bool has_row_scales = m.row_scales != nullptr;
  const int64_t whole = int64_t{1} << m.log2_columns_per_scale;
  const int64_t first = whole - ((m.first_column + columns.begin) & (whole - 1));
  for (int64_t r = 0; r < rows.size(); ++r) {
    const uint8_t* codes = m.code(rows.begin + r, columns.begin);
    for (int64_t i = 0; ahead != 0 && i < bytes; i += kCacheLineBytes) __builtin_prefetch(codes + i + ahead, 0, 2);
    int64_t index = m.scale_index(rows.begin + r, columns.begin);
    const float of_row = m.row_scale(rows.begin + r);
    T* target = out.row(r);
    int64_t left = columns.size();
    for (int64_t count = at_most(first, left); left > 0; count = at_most(whole, left)) {
      const float zero = zeros == nullptr ? 0.0F : static_cast<float>(zeros[index]);
      const float of_block = read_scale(type, scales, index);
      decode(Run{codes, count, has_row_scales ? of_block * of_row : of_block, zero}, target);
      codes += count * kBits / 8;
      target += count;
      left -= count;
      ++index;
    }
  }
}

#if defined(__AVX2__)

// Decodes a run: its rest, which fills no whole vector, in padded memory.
template <class Format, class T>
MAXMOE_INLINE void decode_run(const RunDecoder<T> auto& decoder, const QuantizedMatrix& m, const Run& run, T* out) {
  const int64_t decoded = decoder.decode(run, out);
  const int64_t rest = run.count - decoded;
  if (rest == 0) return;
  if (rest < kCodesAtATime) {
    uint8_t codes[kCodesAtATime] = {};
    T padded[kCodesAtATime];
    const int64_t begin = decoded * Format::kCodes.bits / 8;
    std::memcpy(codes, run.codes + begin, static_cast<size_t>((run.count * Format::kCodes.bits + 7) / 8 - begin));
    if (decoder.decode(Run{codes, kCodesAtATime, run.scale, run.zero}, padded) == kCodesAtATime) {
      std::memcpy(static_cast<void*>(out + decoded), padded, static_cast<size_t>(rest) * sizeof(T));
      return;
    }
  }
  decode_each<Format>(m, run, decoded, out);
}

#endif

}  // namespace

template <class T>
void decode_rows(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead) {
  Formats::with(m.codes, [&]<class Format> {
    constexpr int kBits = Format::kCodes.bits;
#if defined(__AVX2__)
    const RunDecoder<T> auto decoder = typename DecodersOf<Format>::template Runs<T>(m);
    for_each_run<kBits>(m, rows, columns, out, ahead, [&](const Run& run, T* target) MAXMOE_INLINE_LAMBDA {
      decode_run<Format>(decoder, m, run, target);
    });
#else
    for_each_run<kBits>(m, rows, columns, out, ahead,
                        [&](const Run& run, T* target) { decode_each<Format>(m, run, 0, target); });
#endif
  });
}

#define MAXMOE_INSTANTIATE_FOR(T) \
  template void decode_rows(const QuantizedMatrix&, Range, Range, MatrixView<T>, int64_t);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
