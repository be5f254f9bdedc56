// Scales of E4M3 as floats.
#pragma once

#include "kernels/isa/vector.simd.h"
#include "kernels/quantized/codes.h"

#if defined(__AVX2__)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

using Words = Vector<uint32_t>;
using SignedWords = VectorOf<int32_t, kVectorBytes>::type;
using Floats = Vector<float>;

// As value_of_e4m3. Also if the thread takes subnormal operands as zeros, as after torch.set_flush_denormal(True).
MAXMOE_INLINE Floats e4m3_scales(Words codes) {
  const Words magnitudes = codes & 0x7fU;
  // The exponent bias of a float is 120 larger.
  const auto normal = std::bit_cast<Floats>((magnitudes << 20) + (120U << 23));
  const Floats subnormal = __builtin_convertvector(std::bit_cast<SignedWords>(magnitudes), Floats) * 0x1p-9F;
  const Floats finite = magnitudes < 8U ? subnormal : normal;
  const Floats values = magnitudes == 0x7fU ? Floats{} + __builtin_nanf("") : finite;
  return std::bit_cast<Floats>(std::bit_cast<Words>(values) | (codes & 0x80U) << 24);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
