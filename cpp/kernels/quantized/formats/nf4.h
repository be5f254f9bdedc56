// NF4: quantiles of the normal distribution. QLoRA (arXiv:2305.14314), appendix E.
#pragma once

#include "kernels/quantized/codes.h"

namespace maxmoe {

struct Nf4 {
  static constexpr CodeTable kValues = {{-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F,
                                         -0.28444138169288635F, -0.18477343022823334F, -0.09105003625154495F, 0.0F,
                                         0.07958029955625534F, 0.16093020141124725F, 0.24611230194568634F,
                                         0.33791524171829224F, 0.44070982933044434F, 0.5626170039176941F,
                                         0.7229568362236023F, 1.0F}};
  static constexpr Codes kCodes = {.bits = 4, .is_high_first = true, .values = &kValues};
  using Scales = FloatScales;
  static constexpr std::array<NamedFormat, 1> kNames = {{{"nf4", 1, 64}}};
};

}  // namespace maxmoe
