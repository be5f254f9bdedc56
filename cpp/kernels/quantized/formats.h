// The formats of quantized weights, a file each, and choices by format.
#pragma once

#include "kernels/quantized/formats/fp8.h"
#include "kernels/quantized/formats/int4.h"
#include "kernels/quantized/formats/int8.h"
#include "kernels/quantized/formats/mxfp4.h"
#include "kernels/quantized/formats/nf4.h"
#include "kernels/quantized/formats/nvfp4.h"

namespace maxmoe {

template <class... Format>
struct FormatList {
  static constexpr size_t kNumNames = (Format::kNames.size() + ...);

  // Calls body.operator()<Format>() with the format that has some codes.
  template <class Body>
  static MAXMOE_INLINE void with(const Codes* codes, const Body& body) {
    (void)(... || (codes == &Format::kCodes && (body.template operator()<Format>(), true)));
  }

  // Calls body.operator()<Format>() with each format.
  template <class Body>
  static constexpr MAXMOE_INLINE void with_each(const Body& body) {
    (body.template operator()<Format>(), ...);
  }
};

using Formats = FormatList<Mxfp4, Nvfp4, Nf4, Int4, Int8, Fp8>;

}  // namespace maxmoe
