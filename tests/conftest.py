"""Fixtures for all tests: small random models that run in milliseconds, and the real one."""

from __future__ import annotations

import gc

import exercise_table
import pytest
import torch
from pretend_gpu import plugin
from pretend_gpu.plugin import device, gpu  # noqa: F401  every test marked `cuda` has a GPU, if need be a pretended one
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

TINY = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)


def _random(model_class, config, seed: int):
    torch.manual_seed(seed)
    model = model_class(config).eval()
    # Default initialisation gives nearly flat logits, whose argmax rests on rounding: spread them.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def pytest_collection_finish(session) -> None:
    """Python's collector looks no more at what was imported, a million objects at each of its great rounds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tiny_llama():
    """A random FP32 Llama: 6 query heads over 2 KV heads, head_dim 8, tied embeddings."""
    return _random(LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True), seed=11)


@pytest.fixture
def tiny_qwen2():
    """A random FP32 Qwen2: biases on q, k and v, untied head."""
    return _random(Qwen2ForCausalLM, Qwen2Config(**TINY, tie_word_embeddings=False), seed=12)


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """A test that leaves gradients switched off breaks another one, in another file, on another day."""
    yield
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "this test left gradients switched off for all that follow"


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> str:
    """A learner's own model: a tiny random Llama with the course's tokenizer, as a directory."""
    from llm_latency import models

    folder = tmp_path_factory.mktemp("model")
    config = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config |= dict(vocab_size=49152, num_key_value_heads=2, max_position_embeddings=1024)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    models.load_tokenizer("smollm2-135m").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def quick_ceilings(monkeypatch):
    """Ceilings of a made-up chip, so that no test measures this one."""
    from llm_latency import hardware

    rates = {"float32": 20.0, "bfloat16": 20.0}
    fixed = hardware.Ceilings("cpu", "a chip", 2, 20.0, 20.0, rates, {"float32": 100.0, "bfloat16": 200.0})
    monkeypatch.setattr(hardware, "ceilings", lambda *_, **__: fixed)


@pytest.fixture(scope="session")
def target():
    """The course's real model in FP32. Read-only: a test that changes weights must copy it."""
    from llm_latency import models

    return models.load_target("smollm2-135m", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def tokenizer():
    from llm_latency import models

    return models.load_tokenizer("smollm2-135m")


def pytest_configure(config):
    config.addinivalue_line("markers", "silicon(reason): a CUDA test that the pretend GPU cannot answer for")
    config.addinivalue_line("markers", "pretend_card(name): the card that the pretend GPU is in this test")


def pytest_terminal_summary(terminalreporter):
    """Count what the exercises' proofs showed, and say what the CUDA tests ran on."""
    plugin.summary(terminalreporter)
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    rows = exercise_table.lines(reports)
    if rows:
        terminalreporter.section("exercises")
        terminalreporter.write_line("\n".join(rows))
