"""Quantized weights of frozen experts: 4 or 8 bits per weight and a scale for each block of weights.

A `QuantizedStack` takes the place of a stack of matrices, a `QuantizedWeight` the place of a parameter of a module.
Bytes and scales are as in published checkpoints, and value = code * scale, or (code - zero) * scale. The formats, in
`FORMATS` by their names:

- "mxfp4": codes E2M1, one scale for 32 of a row, a power of two (E8M0). gpt-oss.
- "nvfp4": codes E2M1, one scale for 16 of a row (E4M3), times one for the row, float32. ModelOpt, compressed-tensors.
- "fp8_block": codes E4M3, one scale for 128 x 128, float32 or bfloat16. DeepSeek-V3, Kimi-K2-Instruct, Qwen3 FP8.
- "fp8_row": codes E4M3, one scale for a row. compressed-tensors, FP8 per channel.
- "int4": integers with a zero point, one scale for 32, 64, 128, ... of a row. Kimi-K2-Thinking.
- "int8": integers, one scale for a row. compressed-tensors, INT8 per channel.
- "nf4": quantiles of the normal distribution, one scale for 64 of a row, their largest magnitude. QLoRA, bitsandbytes.

In "nvfp4" scale = scale of the block * scale of the row, rounded to float32. Checkpoints have one float32 for a matrix,
which all its rows have here, so that rows of several matrices can be joined, split and sharded.

A row holds the inputs of one output. Blocks at the end of a row or column may be shorter.
"""

from maxmoe.quantization.encoding import quantize
from maxmoe.quantization.formats import FORMATS, Format
from maxmoe.quantization.stack import QuantizedStack
from maxmoe.quantization.weight import QuantizedWeight, StackPart, dequantize_experts
from maxmoe.quantization.weight import on_meta as on_meta
from maxmoe.quantization.weight import put_stack as put_stack
from maxmoe.quantization.weight import stack_parts as stack_parts
from maxmoe.quantization.weight import state_with_stacks as state_with_stacks
from maxmoe.quantization.weight import weights as weights

__all__ = ["FORMATS", "Format", "QuantizedStack", "QuantizedWeight", "StackPart", "dequantize_experts", "quantize"]
