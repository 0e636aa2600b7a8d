"""The speed of light: FLOPs, bytes and the least time of every stage, by arithmetic."""

from llm_latency.roofline.counting import count_flops, count_operators, matmul_rate, operator_us
from llm_latency.roofline.formats import FORMATS, NumberFormat, number_format
from llm_latency.roofline.predict import (
    Peak,
    Share,
    StagePrediction,
    gpu_peak,
    measured_peak,
    predict_request,
    predict_stage,
    share_of_limit,
)
from llm_latency.roofline.shapes import ARCHITECTURES, SHAPES, ModelShape, shape_of
from llm_latency.roofline.twin import narrow_twin
from llm_latency.roofline.work import (
    PARTS,
    Work,
    cache_bytes,
    decode_work,
    forward_work,
    parameter_bytes,
    prefill_work,
    total,
)

__all__ = [
    "ARCHITECTURES",
    "FORMATS",
    "PARTS",
    "SHAPES",
    "ModelShape",
    "NumberFormat",
    "Peak",
    "Share",
    "StagePrediction",
    "Work",
    "cache_bytes",
    "count_flops",
    "count_operators",
    "decode_work",
    "forward_work",
    "gpu_peak",
    "matmul_rate",
    "measured_peak",
    "narrow_twin",
    "number_format",
    "operator_us",
    "parameter_bytes",
    "predict_request",
    "predict_stage",
    "prefill_work",
    "shape_of",
    "share_of_limit",
    "total",
]
