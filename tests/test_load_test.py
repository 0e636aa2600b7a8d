"""The load test: its knee, its steady state, its raw samples, and the command."""

from __future__ import annotations

import json

import kernel_toys
import pytest
import torch
from test_batching import Clock, make_engine
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond.laboratory import batching_bench as bench
from every_millisecond.laboratory import load_test
from every_millisecond.laboratory.workload import Ask, mixed_asks, serve
from llm_latency.engine.kernel_decoder import KernelDecoder


@pytest.mark.parametrize(
    ("shares", "load", "words"),
    [
        ({0.5: 1.0, 1.0: 0.95, 1.5: 0.4}, 1.0, "load 1.5 is not"),
        ({1.5: 0.95, 0.5: 1.0, 1.0: 0.2}, 0.5, "load 1 is not"),  # what keeps up beyond the knee is luck
        ({0.5: 1.0, 1.0: 0.9}, None, "still kept up"),
        ({0.5: 0.89, 1.0: 1.0}, None, "lightest"),
    ],
)
def test_the_knee_is_found_or_called_not_found(shares, load, words):
    """A test that stops before the knee has not seen it: the last load is then no knee."""
    found = load_test.knee(shares)
    assert found.load == load and words in found.why
    assert (load is None) == found.why.startswith("not found")


def test_a_knee_of_one_load_is_refused():
    with pytest.raises(ValueError, match="two or more"):
        load_test.knee({1.0: 1.0})


def test_a_growing_queue_is_no_steady_state(tiny_llama):
    """A percentile over a queue that grows says how long the test was, and nothing of the server."""
    clock = Clock()
    engine = make_engine(tiny_llama, running=1, clock=clock)
    step = engine.step

    def slow_step():
        clock.now += 0.01
        return step()

    engine.step = slow_step
    slow = serve(engine, [Ask((1, 2), 2, 0.1 * i) for i in range(12)], sleep=clock.sleep)
    assert load_test.steady(slow) and len(load_test.settled(slow)) == 11
    told = []
    fast = serve(engine, [Ask((1, 2), 2, 0.001 * i) for i in range(12)], sleep=clock.sleep, progress=told.append)
    assert not load_test.steady(fast) and told[-1] == 24  # those of the first play are done, too
    with pytest.raises(ValueError, match="four or more"):
        load_test.steady(fast[:3])


@kernel_toys.needs_kernel()
def test_three_ways_on_the_kernel_give_the_same_tokens():
    """The engine's gain is measured against the decoder that it runs on: the same rows, alone."""
    toy = kernel_toys.make_toy("llama")
    alone, shared = KernelDecoder.from_model(toy), KernelDecoder.from_model(toy, blocks=16)
    asks = mixed_asks(5, vocab_size=97, seed=0, prompt_tokens=(2, 9), new_tokens=(1, 6))
    expected = bench.run_one_at_a_time(alone, asks)
    assert bench.run_continuous(shared, asks, 2) == expected == bench.run_in_groups(shared, asks, 2)


def test_samples_and_figures_of_a_run(tiny_llama):
    """Raw samples stand beside what is computed from them, and every request is there."""
    titles = []
    found = load_test.run_load_test(
        tiny_llama, vocab_size=97, requests=20, loads=(0.5, 2.0), slots=4,
        progress=lambda title, done, of: titles.append(title),
    )  # fmt: skip
    assert [run["load"] for run in found["runs"]] == [0.5, 2.0] and {"load 0.5", "load 2"} <= set(titles)
    for run in found["runs"]:
        assert len(run["samples"]) == 20
        assert all(sample["end_to_end_ms"] >= sample["first_token_ms"] > 0 for sample in run["samples"])
        assert 0 <= run["goodput_share"] <= 1 and run["first_token_ms_p50"] <= run["first_token_ms_p99"]
        assert run["offered_per_second"] == pytest.approx(run["load"] * found["capacity_per_second"])
    assert len(load_test.lines(found)) == 4 and json.loads(json.dumps(found)) == found
    with pytest.raises(ValueError, match="positive"):
        load_test.run_load_test(tiny_llama, vocab_size=97, requests=20, loads=(0.5, 0))


def test_the_command_writes_a_dated_file(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setattr(load_test, "load_model", lambda profile, slots: (tiny_llama, 97))
    result = CliRunner().invoke(
        cli.app, ["load", "--requests", "20", "--loads", "0.5,1.5", "--slots", "2", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*-load.json")
    assert json.loads(path.read_text())["settings"]["slots"] == 2 and "knee:" in result.output
    wrong = CliRunner().invoke(cli.app, ["load", "--requests", "3", "--out", str(tmp_path)])
    assert wrong.exit_code == 1


@pytest.mark.model
@kernel_toys.needs_kernel()
def test_the_kernel_is_what_is_loaded_here():
    """The long test runs on the course's fastest decoder where there is one."""
    model, vocab_size = load_test.load_model(None, 2)
    assert vocab_size == 49152 and (torch.cuda.is_available() or isinstance(model, KernelDecoder))
