"""`make peers`: the race, its ratios, and peers that are missing or die."""

from __future__ import annotations

import dataclasses
import io
import json

import kernel_toys
import pytest
import torch
from rich.console import Console

from every_millisecond import peers
from every_millisecond.peers import contenders, race
from every_millisecond.peers.contenders import CONTENDERS, Contender, contender
from every_millisecond.processes import Worker, WorkerFailed
from llm_latency import models
from llm_latency.engine import FastDecoder

PROMPT = list(range(3, 20))
WORKER = "every_millisecond.peers.worker"


def _contender(name: str, *, ours: bool = False, **options) -> Contender:
    return Contender(name, name.title(), lambda profile: None, ours=ours, **options)


@pytest.fixture
def fake_processes(monkeypatch):
    """Processes that answer at a known speed, note the order of turns, and may die at a given turn."""
    log: list[str] = []

    class Fake:
        def __init__(self, module: str, arguments: list[str]) -> None:
            self.name, self.turns = arguments[0], 0

        def read(self, limit_s: float) -> None:
            if self.name == "stillborn":
                raise WorkerFailed("ImportError: no such library [/red]")

        def ask(self, request: dict, limit_s: float) -> dict:
            new_tokens = request["new_tokens"]
            log.append(self.name)
            self.turns += 1
            if self.name == "dies" and self.turns == 2:
                raise WorkerFailed("the process was ended by SIGSEGV")
            decode = {"hf-fp32": 400.0, "fast": 50.0}.get(self.name, 100.0)
            return {"prefill_ms": 10.0, "decode_ms": decode, "ids": [7] * new_tokens}

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            log.append(f"close {self.name}")

    monkeypatch.setattr(race, "Worker", Fake)
    return log


def test_ratios_by_hand(fake_processes):
    """Guards against ratios upside down, a first token counted as a decode step, and warm-up rounds in the figures."""
    entries = [_contender("hf-fp32"), _contender("fast", ours=True)]
    result = race.run_race(entries, PROMPT, 5, rounds=4, warmup=2)
    fast = result["ratios"]["fast"]
    assert fast["tokens_per_second"] == 4 / 50e-3
    assert fast["decode_vs_hf-fp32"] == {"median": 8.0, "low": 8.0, "high": 8.0}
    assert fast["total_vs_hf-fp32"]["median"] == pytest.approx(410 / 60)
    assert "decode_vs_fast" not in fast
    assert [len(p["decode_ms"]) for p in result["peers"]] == [4, 4]
    assert result["settings"] == {"prompt_tokens": 17, "new_tokens": 5, "rounds": 4, "warmup": 2}
    json.dumps(result)


def test_turns_alternate_and_processes_end(fake_processes):
    """Guards against one contender that always runs in the shadow of the same other, and processes left behind."""
    race.run_race([_contender("hf-fp32"), _contender("b")], PROMPT, 3, rounds=2, warmup=1)
    assert fake_processes == ["hf-fp32", "b", "b", "hf-fp32", "hf-fp32", "b", "close b", "close hf-fp32"]


def test_a_missing_or_dying_peer_is_reported_and_the_others_go_on(fake_processes):
    """Guards against a race lost to one bad installation, and a remedy that nobody sees."""
    missing = _contender("absent", package="no_such_package_xyz", remedy="run `make peers`")
    entries = [
        _contender("hf-fp32"),
        missing,
        _contender("stillborn"),
        _contender("dies"),
        _contender("fast", ours=True),
    ]
    result = race.run_race(entries, PROMPT, 5, rounds=3, warmup=1)
    by_name = {p["name"]: p for p in result["peers"]}
    assert by_name["absent"]["status"] == "not installed"
    assert "no_such_package_xyz is not installed: run `make peers`" in by_name["absent"]["reason"]
    assert by_name["stillborn"]["status"] == "failed" and "ImportError" in by_name["stillborn"]["reason"]
    assert by_name["dies"]["status"] == "failed" and "SIGSEGV" in by_name["dies"]["reason"]
    assert by_name["fast"]["status"] == "measured" and set(result["ratios"]) == {"hf-fp32", "fast"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(peers.table(result))
    shown = console.export_text()
    for said in ("not installed: no_such_package_xyz", "no such library [/red]", "ended by SIGSEGV"):
        assert said in shown


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"warmup": -1}, {"new_tokens": 1}])
def test_counts_that_measure_nothing(bad):
    """Guards against a median of nothing."""
    arguments = {"new_tokens": 5} | bad
    with pytest.raises(ValueError, match="rounds >= 1"):
        race.run_race([], PROMPT, arguments.pop("new_tokens"), **arguments)


def test_contenders_are_named_once_and_fit_the_profile():
    """Guards against two entries of one name, and llama.cpp racing on another model than the rest."""
    names = [entry.name for entry in CONTENDERS]
    assert len(set(names)) == len(names) and race.BASELINE in names
    assert any(entry.ours for entry in CONTENDERS)
    with pytest.raises(ValueError, match="hf-fp32"):
        contender("gpt-slow")
    gguf = dataclasses.replace(contender("llama-cpp"), package=None)
    assert gguf.unavailable("smollm2-135m") is None
    assert "another model" in gguf.unavailable("llama-7b-shape")


def test_both_ways_of_answering_agree(tiny_llama, monkeypatch):
    """Guards against a peer that answers another prompt, stops early, or counts its tokens differently."""
    monkeypatch.setattr(models, "load_target", lambda profile, dtype: tiny_llama)
    theirs = contenders._hf(torch.float32)(None)(PROMPT, 9)
    ours = contenders._stepper(FastDecoder.from_model(tiny_llama))(PROMPT, 9)
    assert len(theirs.ids) == len(ours.ids) == 9
    eos = tiny_llama.config.eos_token_id
    if eos not in ours.ids:  # forbidden to theirs, so that all answers have one length
        assert theirs.ids == ours.ids
    assert min(theirs.prefill_ms, theirs.decode_ms, ours.prefill_ms, ours.decode_ms) > 0


@pytest.mark.long
def test_a_real_process_that_fails_tells_why():
    """Guards against a race that hangs on a process which died while loading."""
    with pytest.raises(WorkerFailed, match="unknown contender 'nobody'"), Worker(WORKER, ["nobody", ""]) as worker:
        worker.read(120.0)


def test_limits_that_limit_nothing_are_refused():
    """Guards against a race that one peer, compiling for an hour, keeps from ever printing its table."""
    for limit in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"limit_s={limit}"):
            race.run_race([], PROMPT, 5, limit_s=limit)


def test_a_kernel_that_cannot_be_built_is_a_peer_that_is_not_there(monkeypatch):
    """Guards against a race that fails where there is no compiler, and against a reason without its remedy."""
    monkeypatch.setattr(contenders.speculation, "kernel_unavailable", lambda: "no C++ compiler; install g++")
    for name in ("kernel", "kernel-int8", "kernel-lookup", "kernel-conditioned"):
        assert contender(name).ours and contender(name).unavailable("smollm2-135m") == "no C++ compiler; install g++"
    assert contender("fast-int4").unavailable("smollm2-135m") is None


@pytest.mark.model
@kernel_toys.needs_kernel()
def test_the_kernels_contenders_give_one_text(target):
    """Guards against a race between two texts: INT16 activations, with a draft or without, are one function."""
    prompt = list(range(100, 140))
    answers = [contender(name).build("smollm2-135m")(prompt, 6) for name in ("kernel", "kernel-lookup")]
    assert answers[0].ids == answers[1].ids and len(answers[0].ids) == 6
    with torch.inference_mode():
        assert answers[0].ids[0] == int(target(torch.tensor([prompt])).logits[0, -1].argmax())


@pytest.mark.long
@pytest.mark.model
def test_a_real_process_answers(target):
    """Guards against chatter on standard output that is taken for an answer, and against processes that do not end."""
    with Worker(WORKER, ["fast-fp32", "smollm2-135m"]) as worker:
        worker.read(300.0)
        first, second = (worker.ask({"prompt": [100, 200, 300], "new_tokens": 3}, 300.0) for _ in range(2))
        assert worker.close() == 0
    assert first["ids"] == second["ids"] and len(first["ids"]) == 3
    with torch.inference_mode():
        expected = target(torch.tensor([[100, 200, 300]])).logits[0, -1].argmax()
    assert first["ids"][0] == int(expected)


def test_main_writes_a_dated_file(fake_processes, monkeypatch, tmp_path, tokenizer):
    """Guards against figures that are printed and lost."""
    monkeypatch.setattr(peers, "CONTENDERS", [_contender("hf-fp32"), _contender("fast", ours=True)])
    assert peers.main(tmp_path, profile="smollm2-135m") == 0
    (path,) = tmp_path.glob("*-peers.json")
    result = json.loads(path.read_text())
    assert path.name.startswith(result["date"]) and result["settings"]["prompt_tokens"] == 256
    assert result["machine"]["threads"] >= 1


def test_the_names_tell_who_guesses():
    """A draft against none is no race: notebook 13 sorts by the name, which old records have, too."""
    for entry in CONTENDERS:
        assert contenders.guesses(entry.name) == (
            "draft" in entry.title or "assisted" in entry.title or "lookup" in entry.title
        )
