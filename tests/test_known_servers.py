"""Servers that others maintain really start from our commands, answer a stream offline, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from every_millisecond.serving import known, report
from every_millisecond.serving.client import Answer, ask

QUESTION = [{"role": "user", "content": "Count from one to five."}]


def answer(url: str) -> Answer:
    async def one() -> Answer:
        async with aiohttp.ClientSession() as session:
            return await ask(session, url, QUESTION, model=await report.first_model(url), max_tokens=6)

    return asyncio.run(one())


def left_over(word: str) -> list[str]:
    """Command lines of this machine's processes that hold the word."""
    lines = (path.read_bytes().replace(b"\0", b" ").decode(errors="replace") for path in processes())
    return [line for line in lines if word in line]


def processes():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes():
                yield folder / "cmdline"
        except OSError:  # it ended in between
            continue


def started_and_ended(command: known.Command, log: Path) -> Answer:
    with known.known(command, log) as url:
        found = answer(url)
    port = url.rpartition(":")[2]
    if Path("/proc/self").exists():
        assert left_over(f" {port} ") == [], "the server outlived its block"
    return found


@pytest.mark.model
def test_llama_cpp_answers_from_the_gguf(tmp_path):
    """Guards against a wheel whose settings are named otherwise: the program in `known` would start nothing."""
    from llm_latency.models import bundled

    found = started_and_ended(known.llama_cpp(bundled.gguf_path(), threads=1, slots=2), tmp_path / "log")
    assert found.error is None and found.tokens == 6 and found.text, (found, (tmp_path / "log").read_text())


@pytest.mark.model
def test_llama_cpp_names_its_model_and_shares_its_context(tmp_path):
    """The model's name is the file's, without the folder: a report that is passed on tells nothing of one's disk."""
    from llm_latency.models import bundled

    gguf = bundled.gguf_path()
    with known.known(known.llama_cpp(gguf, threads=1, slots=3, context=64), tmp_path / "log") as url:
        assert asyncio.run(report.first_model(url)) == gguf.name
    log = (tmp_path / "log").read_text()
    assert "n_slots = 3" in log and "n_threads = 1" in log, log


@pytest.mark.long
def test_transformers_serve_answers_from_a_folder(tiny_directory, tmp_path, monkeypatch):
    """A folder by its path, offline: the hub is not asked even where the environment would allow it."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = started_and_ended(known.transformers_serve(tiny_directory), tmp_path / "log")
    assert found.error is None and found.tokens and found.text, (found, (tmp_path / "log").read_text())


def test_vllm_is_offered_only_with_cuda(tmp_path, monkeypatch):
    import torch

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="not installed"):
        known.vllm(tmp_path)
    monkeypatch.setattr(known, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        known.vllm(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = known.vllm(tmp_path).words
    assert "{port}" in words and str(tmp_path) in words


def test_what_cannot_be_served_is_refused_before_a_start(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        known.llama_cpp(tmp_path / "no.gguf", threads=1, slots=1)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        known.transformers_serve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="threads=0"):
        known.transformers_serve(tmp_path, threads=0)
    assert known.transformers_serve(tmp_path, threads=3).variables["OMP_NUM_THREADS"] == "3"
    for wrong in (dict(threads=0, slots=1), dict(threads=1, slots=0), dict(threads=1, slots=1, context=0)):
        with pytest.raises(ValueError, match="=0"):
            known.llama_cpp(tmp_path / "no.gguf", **wrong)


def test_a_readers_own_server_is_an_address_or_said_to_be_none(monkeypatch):
    monkeypatch.setenv(known.VARIABLE, "http://gpu-box:8000/v1/")
    assert known.given() == "http://gpu-box:8000"
    monkeypatch.setenv(known.VARIABLE, "gpu-box:8000")
    with pytest.raises(ValueError, match=r"LLM_LATENCY_SERVER: .* expected one like"):
        known.given()
    for nothing in ("", " "):
        monkeypatch.setenv(known.VARIABLE, nothing)
        assert known.given() is None
    monkeypatch.delenv(known.VARIABLE)
    assert known.given() is None and os.environ.get(known.VARIABLE) is None
