"""Quantised weights over PyTorch's packed kernels: INT8 per output channel, INT4 in blocks, and INT8 times INT8."""

from llm_latency.quantization.dynamic import DynamicInt8Weight
from llm_latency.quantization.kernels import MANY_ROWS, PrepackedWeight
from llm_latency.quantization.linear import Int4Linear, Int8Linear, QuantizedLinear
from llm_latency.quantization.model import QuantizationReport, quantize_
from llm_latency.quantization.rounding import (
    Blocks,
    dequantize_int4,
    dequantize_int8,
    quantize_blocks,
    quantize_int4,
    quantize_int8,
)
from llm_latency.quantization.smoothing import ffn_smoothing

__all__ = [
    "MANY_ROWS",
    "Blocks",
    "DynamicInt8Weight",
    "Int4Linear",
    "Int8Linear",
    "PrepackedWeight",
    "QuantizationReport",
    "QuantizedLinear",
    "dequantize_int4",
    "dequantize_int8",
    "ffn_smoothing",
    "quantize_",
    "quantize_blocks",
    "quantize_int4",
    "quantize_int8",
]
