"""The speed of light: FLOPs, bytes and the least time of every stage, by arithmetic."""

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
from llm_latency.roofline.shapes import (
    FORMATS,
    SHAPES,
    ModelShape,
    NumberFormat,
    number_format,
    shape_of,
)
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
    "decode_work",
    "forward_work",
    "gpu_peak",
    "measured_peak",
    "number_format",
    "parameter_bytes",
    "predict_request",
    "predict_stage",
    "prefill_work",
    "shape_of",
    "share_of_limit",
    "total",
]
