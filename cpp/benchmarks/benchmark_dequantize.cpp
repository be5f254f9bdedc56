#include "kernels/quantized/dequantize.h"

#include "cases.h"
#include "kernels/quantized/formats.h"

namespace maxmoe::benchmarks {
namespace {

struct Format {
  const char* name;
  const Codes* codes;
  ScaleType scale_type;
  int log2_rows_per_scale;
  int log2_columns_per_scale;
};
constexpr Format kFormats[] = {
    {"mxfp4", &Mxfp4::kCodes, ScaleType::e8m0, 0, 5},   {"nvfp4", &Nvfp4::kCodes, ScaleType::e4m3, 0, 4},
    {"nf4", &Nf4::kCodes, ScaleType::float32, 0, 6},    {"int4", &Int4::kCodes, ScaleType::bfloat16, 0, 7},
    {"int8", &Int8::kCodes, ScaleType::float32, 0, 62}, {"fp8", &Fp8::kCodes, ScaleType::float32, 7, 7}};

template <class T>
void benchmark(Session& session, const RowsShape& shape, const Format& format) {
  const Case c{"dequantize", text(shape) + ", " + format.name, dtype_name<T>()};
  if (!session.is_selected(c)) return;
  const int64_t columns = shape.hidden_size;
  // Any bytes are valid codes. A row of codes ends at a multiple of 4 bytes.
  const int64_t row_bytes = (columns * format.codes->bits + 31) / 32 * 4;
  const Table<T> codes(shape.num_rows, row_bytes / int64_t{sizeof(T)});
  const Table<T> out(shape.num_rows, columns);
  // 0x3f in every byte is an ordinary scale in every type.
  const std::vector<std::byte> scales(static_cast<size_t>(shape.num_rows * (columns / 32 + 1) * 4), std::byte{0x3f});
  const std::vector<float> row_scales(static_cast<size_t>(shape.num_rows), 0.5F);
  QuantizedStack stack;
  stack.count = 1;
  QuantizedMatrix& m = stack.first;
  m.codes = format.codes;
  m.data = reinterpret_cast<const uint8_t*>(codes.data());
  m.row_bytes = row_bytes;
  m.rows = shape.num_rows;
  m.columns = columns;
  m.scale_type = format.scale_type;
  m.scales = scales.data();
  m.row_scales = format.scale_type == ScaleType::e4m3 ? row_scales.data() : nullptr;
  m.scales_per_row = ((columns - 1) >> format.log2_columns_per_scale) + 1;
  m.log2_rows_per_scale = format.log2_rows_per_scale;
  m.log2_columns_per_scale = format.log2_columns_per_scale;
  time_read_write(session, c, codes, out, [&] { dequantize(Dequantize<T>{stack, out.data()}, session.threads()); });
}

const Registration registration([](Session& session) {
  for (const RowsShape& shape : kRowsShapes) {
    for (const Format& format : kFormats) {
      benchmark<float>(session, shape, format);
      benchmark<BFloat16>(session, shape, format);
    }
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
