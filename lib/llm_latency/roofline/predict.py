"""From work to milliseconds: the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009), and launches.

A part of a pass takes the longer of two times: its FLOPs at the machine's rate, its bytes at the machine's bandwidth.
Parts run one after another, so their times add up. A third time, that of issuing the operators, adds to the work on a
CPU and runs beside it on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_latency import hardware
from llm_latency.roofline.shapes import NumberFormat, number_format, shape_of
from llm_latency.roofline.work import Work, decode_work, prefill_work, total


@dataclass(frozen=True, slots=True)
class Peak:
    """What a machine can do at most: bytes and FLOPs per second.

    launches_overlap: operators are issued while earlier ones still run (a GPU), so that only the longer time counts.
    """

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    launches_overlap: bool = False

    def __post_init__(self) -> None:
        if not (self.bandwidth_bytes_per_s > 0 and self.flops_per_s > 0):  # NaN is refused, too
            raise ValueError(f"{self.name}: bandwidth and FLOP rate must be above 0, got {self}")

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which both limits meet: below it, bandwidth binds; above it, arithmetic."""
        return self.flops_per_s / self.bandwidth_bytes_per_s


def gpu_peak(name: str, weights: str | NumberFormat = "bfloat16") -> Peak:
    """A named GPU's datasheet peak for weights of a dtype (INT8 and INT4 are unpacked and multiplied in BF16).

    Raises KeyError that lists the known GPUs where `name` is not among them.
    """
    sheet = hardware.datasheet_peak(name)
    compute = number_format(weights).compute
    tflops = sheet.fp32_tflops if compute == "float32" else sheet.bf16_tflops
    return Peak(name, sheet.bandwidth_gbps * 1e9, tflops * 1e12, launches_overlap=True)


def measured_peak(ceilings: hardware.Ceilings, weights: str | NumberFormat = "float32") -> Peak:
    """This machine's measured ceilings for weights of a dtype.

    Bandwidth is what a matrix times one vector reached in that dtype, since that is what a decode step consists of;
    packed formats, which have no such figure, are held to the plain read bandwidth, which no kernel beats. The FLOP
    rate is the matrix product's in the compute dtype, or in FP32 where that is faster: a kernel may widen its numbers
    first, as good ones do on a CPU without BF16 units.

    Raises ValueError where the ceilings lack that dtype.
    """
    stored = number_format(weights)
    if stored.compute not in ceilings.matmul_gflops:
        known = ", ".join(ceilings.matmul_gflops)
        raise ValueError(f"no measured matrix rate for {stored.compute!r} on {ceilings.device}; measured: {known}")
    gbps = ceilings.gemv_gbps.get(stored.name, ceilings.read_gbps)
    on_gpu = ceilings.device.startswith("cuda")
    gflops = max(ceilings.matmul_gflops[stored.compute], ceilings.matmul_gflops.get("float32", 0.0))
    return Peak(ceilings.name, gbps * 1e9, gflops * 1e9, launches_overlap=on_gpu)


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What a stage must take, in ms, and the limit that sets it: "compute", "bandwidth" or "launch".

    compute_ms and bandwidth_ms: each limit alone, over the whole stage. launch_ms: issuing its operators. parts: the
    same for each part of the pass, without launches.
    """

    name: str
    work: Work
    ms: float
    bound: str
    compute_ms: float
    bandwidth_ms: float
    launch_ms: float = 0.0
    parts: tuple[StagePrediction, ...] = ()


def _limits_ms(work: Work, peak: Peak) -> tuple[float, float]:
    return work.flops / peak.flops_per_s * 1e3, work.bytes / peak.bandwidth_bytes_per_s * 1e3


def predict_stage(name: str, parts: dict[str, Work], peak: Peak, *, launch_ms: float = 0.0) -> StagePrediction:
    """Predict a stage from the work of its parts. launch_ms: what issuing all its operators takes."""
    if not launch_ms >= 0:
        raise ValueError(f"launch_ms={launch_ms} must not be negative")
    predicted = []
    for part, work in parts.items():
        compute, bandwidth = _limits_ms(work, peak)
        bound = "compute" if compute > bandwidth else "bandwidth"
        predicted.append(StagePrediction(part, work, max(compute, bandwidth), bound, compute, bandwidth))
    work_ms = sum(part.ms for part in predicted)
    by_bound = {bound: sum(part.ms for part in predicted if part.bound == bound) for bound in ("compute", "bandwidth")}
    bound = "launch" if launch_ms > work_ms else max(by_bound, key=by_bound.__getitem__)
    ms = max(work_ms, launch_ms) if peak.launches_overlap else work_ms + launch_ms
    whole = total(parts)
    return StagePrediction(name, whole, ms, bound, *_limits_ms(whole, peak), launch_ms, tuple(predicted))


def predict_request(
    model: object,
    peak: Peak,
    *,
    prompt_tokens: int = 256,
    new_tokens: int = 50,
    batch: int = 1,
    weights: str | NumberFormat = "bfloat16",
    cache: str | NumberFormat | None = None,
    kv_cache: bool = True,
    prefill_peak: Peak | None = None,
    launch_ms_per_pass: float = 0.0,
) -> dict[str, StagePrediction]:
    """Predict the stages "prefill" and "decode" of a request.

    The first new token comes out of the prefill, so decode is new_tokens - 1 passes. prefill_peak: the peak that holds
    at the prefill's own shape, where it is known: a large square matmul is kinder than a small model's matrices.
    kv_cache=False: each step reads all again.
    """
    shape = shape_of(model)
    options = {"batch": batch, "weights": weights, "cache": cache}
    prefill = prefill_work(shape, prompt_tokens, **options)
    decode = decode_work(shape, prompt_tokens, new_tokens, kv_cache=kv_cache, **options)
    decode_peak = peak if kv_cache else prefill_peak or peak
    decode_launch_ms = launch_ms_per_pass * (new_tokens - 1)
    return {
        "prefill": predict_stage("prefill", prefill, prefill_peak or peak, launch_ms=launch_ms_per_pass),
        "decode": predict_stage("decode", decode, decode_peak, launch_ms=decode_launch_ms),
    }


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a limit was reached: achieved rate over the peak's, of "bandwidth" or "compute"."""

    fraction: float
    limit: str

    def __str__(self) -> str:
        return f"{self.fraction:.0%} of {self.limit}"


def share_of_limit(work: Work, measured_ms: float, peak: Peak) -> Share:
    """The share of the nearer limit that a measured time reached; above 1 the time, the bytes or the peak is wrong.

    Raises ValueError unless measured_ms is above 0.
    """
    if not measured_ms > 0:
        raise ValueError(f"measured_ms={measured_ms} must be above 0")
    compute, bandwidth = (least / measured_ms for least in _limits_ms(work, peak))
    return Share(max(bandwidth, compute), "compute" if compute > bandwidth else "bandwidth")
