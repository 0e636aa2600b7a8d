"""Quantised weights over PyTorch's packed kernels: INT8 per output channel, INT4 in blocks, and INT8 times INT8."""

from llm_latency.quantization.dynamic import DynamicInt8Weight, ffn_smoothing
from llm_latency.quantization.kernels import MANY_ROWS, PrepackedWeight
from llm_latency.quantization.linear import Int4Linear, Int8Linear, QuantizationReport, QuantizedLinear, quantize_
from llm_latency.quantization.rounding import (
    Blocks,
    dequantize,
    quantize_blocks,
    quantize_rows,
    quantize_symmetric,
    round_symmetric,
)

__all__ = [
    "MANY_ROWS",
    "Blocks",
    "DynamicInt8Weight",
    "Int4Linear",
    "Int8Linear",
    "PrepackedWeight",
    "QuantizationReport",
    "QuantizedLinear",
    "dequantize",
    "ffn_smoothing",
    "quantize_",
    "quantize_blocks",
    "quantize_rows",
    "quantize_symmetric",
    "round_symmetric",
]
