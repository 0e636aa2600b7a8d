"""Weight-only quantisation: INT8 per output channel and INT4 in blocks, over PyTorch's packed kernels."""

from llm_latency.quantization.kernels import PrepackedWeight
from llm_latency.quantization.linear import MANY_ROWS, Int4Linear, Int8Linear, QuantizedLinear
from llm_latency.quantization.model import QuantizationReport, quantize_
from llm_latency.quantization.rounding import (
    Blocks,
    dequantize_int4,
    dequantize_int8,
    quantize_blocks,
    quantize_int4,
    quantize_int8,
)

__all__ = [
    "MANY_ROWS",
    "Blocks",
    "Int4Linear",
    "Int8Linear",
    "PrepackedWeight",
    "QuantizationReport",
    "QuantizedLinear",
    "dequantize_int4",
    "dequantize_int8",
    "quantize_",
    "quantize_blocks",
    "quantize_int4",
    "quantize_int8",
]
