"""The fast decoder: a lean Llama-family model in FP32, BF16, INT8 or INT4."""

from llm_latency.engine.fast_decoder import DecoderOptions, FastDecoder

__all__ = ["DecoderOptions", "FastDecoder"]
