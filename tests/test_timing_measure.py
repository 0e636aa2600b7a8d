"""measure, compare, self_check: what is counted, in which order, and what is said of odd samples."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from every_millisecond.laboratory.self_check import SelfCheck, self_check
from every_millisecond.laboratory.simulated_stream import SimulatedStream
from llm_latency.timing import Comparison, Measurement, Ratio, compare, measure

measure_module = importlib.import_module("llm_latency.timing.measure")  # the package's attribute is the function


def measurement(*samples: float) -> Measurement:
    return Measurement(samples_ms=samples, returned_ms=samples, first_call_ms=1.0, device="cpu")


def test_first_call_and_warmup_are_kept_out_of_the_samples():
    """Guards against a compilation in the first call that ends up in the statistics."""
    calls = []

    def fn() -> None:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.05)

    result = measure(fn, warmup=2, repeats=5, device="cpu")
    assert len(calls) == 1 + 2 + 5
    assert len(result.samples_ms) == 5
    assert result.first_call_ms >= 50 > result.median_ms


def test_median_and_percentiles_by_hand():
    """Guards against a mean called a median, and percentiles off by one (closed form: numpy's linear method)."""
    result = measurement(5.0, 1.0, 2.0, 3.0, 100.0)
    assert result.median_ms == 3
    assert result.p10_ms == pytest.approx(1.4)
    assert result.p90_ms == pytest.approx(62)
    assert measurement(7.0).p10_ms == measurement(7.0).median_ms == measurement(7.0).p90_ms == 7
    samples = torch.rand(37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert measurement(*samples.tolist()).p90_ms == pytest.approx(torch.quantile(samples, 0.9).item())


def test_a_first_sample_far_off_is_reported():
    """Guards against too short a warm-up that nobody notices; noise alone must not raise the alarm."""
    assert "first sample is 3.00 times" in measurement(3.0, 1.0, 1.01, 0.99, 1.0).report()
    assert measurement(0.2, 1.0, 1.01, 0.99, 1.0).notes  # far below is as odd as far above
    assert not measurement(1.2, 1.0, 1.01, 0.99, 1.0).notes
    assert not measurement(3.0, 1.0, 2.0, 0.5, 4.0).notes  # all samples are as far apart
    assert not measurement(3.0, 1.0).notes  # too few to tell


def test_asynchronous_work_is_awaited():
    """Guards against the launch time passed off as the work's (case 19)."""
    with SimulatedStream() as stream:
        result = measure(lambda: stream.launch(5), warmup=1, repeats=4, device=stream)
        assert min(result.samples_ms) >= 5
        assert result.launch_ms < result.median_ms
        assert max(result.returned_ms) <= max(result.samples_ms)
        assert result.device == "simulated"


def test_work_left_over_from_before_is_not_counted():
    """Guards against a first sample that pays for what was queued earlier: the device is idle when the clock starts."""
    with SimulatedStream() as stream:
        stream.launch(300)
        result = measure(lambda: stream.launch(1), warmup=0, repeats=3, device=stream)
        assert result.first_call_ms < 300


def test_launch_bound_work_shows_as_such():
    """Guards against a device time where the launches alone decide (case 22)."""
    with SimulatedStream(launch_us=2000) as stream:
        result = measure(lambda: stream.launch(0.001), warmup=0, repeats=3, device=stream)
        assert result.launch_ms >= 2
        assert result.median_ms >= 2


def test_cold_cache_is_flushed_before_each_sample_and_outside_the_clock(monkeypatch):
    """Guards against a cold mode that times its own flush, or that flushes once (case 22)."""
    events = []

    class SlowFlusher:
        nbytes, partial = 1234, False

        def __init__(self, device: torch.device) -> None:
            assert device.type == "cpu"

        def flush(self) -> None:
            events.append("flush")
            time.sleep(0.03)

    monkeypatch.setattr(measure_module, "CacheFlusher", SlowFlusher)
    result = measure(lambda: events.append("work"), warmup=1, repeats=3, device="cpu", cold_cache=True)
    assert events == ["work"] + ["flush", "work"] * 4
    assert result.median_ms < 30
    assert result.cold_cache and result.flushed_bytes == 1234
    assert "cold cache" in result.report()
    warm = measure(lambda: None, warmup=0, repeats=1, device="cpu")
    assert "warm cache" in warm.report() and warm.flushed_bytes == 0


def test_flusher_passes_over_twice_the_cache_and_says_when_it_cannot(monkeypatch):
    """Guards against a buffer that fits into the cache, and against a partial flush that is kept quiet."""
    monkeypatch.setattr(measure_module, "last_level_cache_bytes", lambda: 1 << 20)
    flusher = measure_module.CacheFlusher(torch.device("cpu"))
    assert flusher.nbytes == 2 << 20 and not flusher.partial
    flusher.flush()
    assert int(flusher._buffer.sum()) == flusher._buffer.numel()  # every element was touched
    monkeypatch.setattr(measure_module, "_LARGEST_BUFFER", 1 << 20)
    assert measure_module.CacheFlusher(torch.device("cpu")).partial
    partly = Measurement((1.0,), (1.0,), 1.0, "cpu", cold_cache=True, flushed_bytes=1 << 20, flush_is_partial=True)
    assert "partly warm" in partly.report()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"repeats": 0}, ValueError),
        ({"repeats": -1}, ValueError),
        ({"repeats": 2.0}, TypeError),
        ({"repeats": True}, TypeError),
        ({"warmup": -1}, ValueError),
        ({"warmup": None}, TypeError),
        ({"device": "gpu0"}, ValueError),
        ({"device": "cuda:99"}, ValueError),
    ],
)
def test_wrong_arguments_are_named_before_any_call(wrong, error):
    """Guards against an empty list of samples, and a device that nobody synchronises."""
    calls = []
    with pytest.raises(error, match=next(iter(wrong))):
        measure(lambda: calls.append(1), **wrong)
    wrong = {("rounds" if name == "repeats" else name): value for name, value in wrong.items()}
    with pytest.raises(error, match=next(iter(wrong))):
        compare({"a": lambda: calls.append(1), "b": lambda: calls.append(1)}, **wrong)
    assert not calls


def test_what_cannot_be_called_is_refused():
    """Guards against timing a result instead of the work: measure(work()) is a common slip."""
    with pytest.raises(TypeError, match="fn is 3"):
        measure(3)
    with pytest.raises(TypeError, match=r"functions\['b'\]"):
        compare({"a": lambda: None, "b": None})
    with pytest.raises(TypeError, match="expected a mapping"):
        compare([lambda: None])
    with pytest.raises(ValueError, match="holds 1; expected two or more"):
        compare({"a": lambda: None})


def test_an_error_in_the_work_passes_through_and_the_collector_is_restored():
    """Guards against a session whose garbage collector stays off after one failed measurement."""
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")
    assert gc.isenabled()


def test_compare_takes_turns_in_alternating_order():
    """Guards against one side always measured first, or all of one side before all of the other."""
    order = []
    result = compare({name: (lambda name=name: order.append(name)) for name in "abc"}, rounds=3, warmup=1, device="cpu")
    assert "".join(order) == "abc" + "abc" + "cba" + "abc" + "cba"
    assert {name: len(samples) for name, samples in result.samples_ms.items()} == {"a": 3, "b": 3, "c": 3}
    assert list(result.median_ms) == list(result.p10_ms) == list(result.p90_ms) == ["a", "b", "c"]
    assert set(result.first_call_ms) == {"a", "b", "c"}


def test_ratio_is_taken_round_by_round():
    """Guards against a ratio of medians, which a machine that slows down half-way would spoil."""
    result = Comparison({"slow": (2.0, 4.0, 20.0), "fast": (1.0, 2.0, 10.0)}, {"slow": 2.0, "fast": 1.0}, "cpu")
    assert result.ratio("slow", "fast") == Ratio(2.0, 2.0, 2.0)
    assert result.speedup("fast", "slow") == Ratio(2.0, 2.0, 2.0)
    assert result.ratio("fast", "slow").median == 0.5
    assert "2.00 times (2.00 to 2.00)" in result.report("fast")
    spread = Comparison({"x": (1.0, 2.0, 3.0), "y": (1.0, 1.0, 1.0)}, {"x": 1.0, "y": 1.0}, "cpu").ratio("x", "y")
    assert (spread.median, spread.low, spread.high) == pytest.approx((2, 1.2, 2.8))
    with pytest.raises(KeyError, match="'other' was not compared; known: slow, fast"):
        result.ratio("slow", "other")


def test_compare_awaits_a_simulated_device():
    """Guards against a comparison of launch times, in which everything is equally fast (case 19)."""
    with SimulatedStream() as stream:
        work = {"short": lambda: stream.launch(2), "long": lambda: stream.launch(20)}
        result = compare(work, rounds=3, warmup=0, device=stream)
    assert min(result.samples_ms["long"]) >= 20
    assert result.ratio("long", "short").median > 1


def test_self_check_runs_and_judges_by_the_limits():
    """Guards against a check that only prints that it checked: both verdicts must be able to fail."""
    found = self_check("cpu")
    assert found.stage_cost_us > 0 and found.measure_ms > 0 and found.torch_timer_ms > 0 and found.ratio > 0
    assert found.device == "cpu"
    spread = {"ratio_low": 0.95, "ratio_high": 1.15}
    good = SelfCheck(stage_cost_us=0.9, measure_ms=1.0, torch_timer_ms=1.02, ratio=0.98, device="cpu", **spread)
    assert good.stage_is_cheap and good.agrees and good.report().count(": ok") == 2
    bad = SelfCheck(stage_cost_us=5.1, measure_ms=1.0, torch_timer_ms=0.9, ratio=1.11, device="cpu", **spread)
    assert not bad.stage_is_cheap and not bad.agrees
    assert "too much" in bad.report() and "too far apart" in bad.report()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing asynchronous but the simulation")
def test_measure_awaits_cuda():
    """Guards against launch times on the real thing (case 19); cold and warm are both offered (case 22)."""
    a = torch.randn(4096, 4096, device="cuda")
    result = measure(lambda: a @ a, device="cuda")
    assert result.launch_ms < result.median_ms
    cold = measure(lambda: a @ a, device="cuda", cold_cache=True)
    assert cold.flushed_bytes > 0


def test_the_clocks_load_little():
    """Guards against a timer that drags in transformers: its own import takes hundredths of a second."""
    program = "import sys, torch; old = set(sys.modules); import llm_latency.timing; print(*set(sys.modules) - old)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.removeprefix("llm_latency.") for name in loaded if name.startswith("llm_latency.")}
    assert {name for name in ours if not name.startswith("timing")} == {"arguments", "host"}
    assert not {"transformers", "scipy", "matplotlib", "filelock", "platformdirs"} & set(loaded)


def in_the_notebooks_test_run(script: str) -> list[str]:
    """The lines that a program prints under the limits of `make test`'s notebooks."""
    folder = Path(__file__).resolve().parent / "offline"
    environment = os.environ | {"PYTHONPATH": str(folder), "LLM_LATENCY_TEST_SAMPLES": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_notebooks_test_run_takes_few_samples():
    """`make test` looks at what notebooks say, not at their figures: ten samples of everything would take half an hour.
    Guards against a limit that reaches nobody, or that hides a wrong count from the function."""
    counts, refusal = in_the_notebooks_test_run(
        "from llm_latency.timing import compare, measure\n"
        "print(len(measure(lambda: 0, repeats=9, warmup=50, device='cpu').samples_ms), end=' ')\n"
        "print(len(measure(lambda: 0, repeats=1, device='cpu').samples_ms), end=' ')\n"
        "turns = compare({'a': lambda: 0, 'b': lambda: 0}, device='cpu')\n"
        "print(len(turns.samples_ms['a']))\n"
        "try: measure(lambda: 0, repeats=0, device='cpu')\n"
        "except ValueError as error: print(error)\n"
    )
    assert counts == "1 1 1" and "repeats=0" in refusal


@pytest.mark.long  # for it imports transformers
def test_the_bar_and_the_diagnosis_are_limited_too():
    """Guards against a constant that has another name now, and is limited no more."""
    script = "from every_millisecond import subject\nfrom every_millisecond.notebook import bar\n"
    script += "print(bar.REPEATS, subject.SLOW_MS, subject.QUALITY_TOKENS)\n"
    assert in_the_notebooks_test_run(script) == ["1 0.0 32"]
