"""The counted GPU memory: its closed forms against an allocator, its books against the notebooks, its refusals."""

from __future__ import annotations

import ast
import gc
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from every_millisecond import gpu_memory
from llm_latency import models, roofline
from llm_latency.engine import FastDecoder
from llm_latency.models import profiles

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import count_memory  # noqa: E402

SIZES = dict(hidden_size=128, intermediate_size=288, num_hidden_layers=1, vocab_size=2048, num_attention_heads=4)
MODELS = {
    "untied, biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
}
FORMATS = [("float32", {}), ("bfloat16", {}), ("int8", {}), ("int8", {"keep_bfloat16": False})]
FORMATS += [("int4", {}), ("int4", {"head": "int4"}), ("int4", {"keep_bfloat16": False})]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real allocator rounds every tensor up")
@pytest.mark.parametrize("kind, dtype", [("untied, biases", "bfloat16"), ("tied", "float32")])
def test_the_closed_forms_are_what_is_allocated(gpu, kind, dtype):
    """Guards against a copy that the count forgets (a tied head's, prefill's) or counts twice, and against bytes in
    the way of rounding that fill a card which the sum says is large enough."""
    before = gpu.allocated
    model = MODELS[kind]().eval().to(getattr(torch, dtype)).cuda()
    shape = roofline.shape_of(model)
    assert gpu.allocated - before == pytest.approx(gpu_memory.model_bytes(shape, dtype), abs=8192)  # rotary tables
    for weights, options in FORMATS:
        gc.collect()
        before = gpu.peak = gpu.allocated
        decoder = FastDecoder.from_model(model, weights, max_length=128, **options)
        copies, head = options.get("keep_bfloat16", True), options.get("head")
        counted = gpu_memory.decoder_bytes(shape, weights, source=dtype, head=head, copies=copies, slots=128)
        assert gpu.allocated - before == pytest.approx(counted, abs=8192), (weights, options)
        way = gpu_memory.rounding_bytes(shape, weights, head)
        assert gpu.peak - before < 1.03 * (counted + way) + 2 * shape.hidden * 2 * shape.ffn * 2, (weights, options)
        del decoder


def calls(notebook: nbformat.NotebookNode) -> dict[str, int]:
    """How often a notebook's cells call what brings a model's weights to the card."""
    found = dict.fromkeys(gpu_memory.CALLS, 0)
    for cell in notebook.cells:
        for node in ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in found:
                found[node.func.attr] += 1
    return found


def load(number: str) -> nbformat.NotebookNode:
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return nbformat.read(path, as_version=4)


def test_every_notebook_is_counted():
    """Guards against a table that leaves out the one notebook that does not fit."""
    assert [path.name[:2] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))] == list(gpu_memory.NOTEBOOKS)


@pytest.mark.parametrize("number", gpu_memory.NOTEBOOKS)
def test_the_books_hold_what_the_cells_make(number):
    """Guards against a model or a copy that a notebook makes and the table does not know."""
    assert calls(load(number)) == gpu_memory.count(number, "qwen2.5-7b").calls


def test_a_planted_fp32_copy_is_seen():
    """Guards against a check of the books that a further FP32 copy of a 7B model slips through."""
    notebook = load("08")
    notebook.cells.insert(12, nbformat.v4.new_code_cell("again = models.load_target(dtype=torch.float32)"))
    assert calls(notebook) != gpu_memory.count("08", "qwen2.5-7b").calls


def test_shapes_are_the_profiles(monkeypatch):
    """Guards against a count of another model than the one that is loaded."""
    monkeypatch.setattr(profiles.hardware, "machine_facts", lambda: {"gpu_memory_gb": 80.0})
    for name in ("smollm2-135m", "llama-7b-shape"):
        ours, loaded = gpu_memory.PAIRS[name][0], roofline.shape_of(models.load_config(name))
        assert (ours.parameters, ours.layers, ours.kv_heads) == (loaded.parameters, loaded.layers, loaded.kv_heads)
    assert set(gpu_memory.PAIRS) == set(gpu_memory.GOALS_GB) == set(models.PROFILES)
    assert gpu_memory.PAIRS["qwen2.5-7b"][1].parameters == 494_032_768  # the model card's 0.49B


def test_counts_by_hand():
    """Guards against a fullest moment that is not the fullest: FP32 and 16 bits of Qwen2.5-7B are 30.5 and 15.2 GB."""
    five = gpu_memory.count("05", "qwen2.5-7b")
    assert five.cell == 25 and five.nbytes == pytest.approx(45.7e9 + 3.8e9 + gpu_memory.RESERVE, rel=0.01)


@pytest.mark.parametrize("notebook, profile", [("99", "qwen2.5-7b"), ("08", "gpt-9")])
def test_unknown_names(notebook, profile):
    """Guards against a table of nothing."""
    with pytest.raises(KeyError, match="expected one of"):
        gpu_memory.count(notebook, profile)


def test_the_documented_table_is_the_counted_one():
    """Guards against a table in docs/gpu.md that nobody counted again after a notebook changed."""
    text = count_memory.PAGE.read_text(encoding="utf-8")
    assert count_memory.with_table(text) == text, "run tools/count_memory.py"
    with pytest.raises(ValueError, match="lacks the marks"):
        count_memory.with_table("no table here")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="this GPU may be large enough")
@pytest.mark.pretend_card("T4")
def test_a_card_too_small_is_refused_before_anything_is_loaded(gpu, monkeypatch):
    """Guards against a notebook that dies of CUDA's out-of-memory error in its middle, without naming a way out."""

    def three_models(book: gpu_memory.Book) -> None:
        for cell in (4, 5, 6):
            book.target(cell, f"the model of cell {cell}", "float32")

    monkeypatch.setitem(gpu_memory.NOTEBOOKS, "08", three_models)
    with pytest.raises(RuntimeError) as refused:
        gpu_memory.check_card("08", "smollm2-1.7b")
    said = str(refused.value)
    assert "notebook 08 on profile smollm2-1.7b needs" in said and "Tesla T4 has 15.8 GB" in said
    assert said.endswith("set LLM_LATENCY_PROFILE=smollm2-135m") and gpu.allocated == 0
    gpu_memory.check_card("04", "smollm2-1.7b")
    gpu_memory.check_card("08", "smollm2-135m")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="fills a pretended card")
@pytest.mark.pretend_card("T4")
def test_what_others_use_is_not_ours(monkeypatch):
    """Guards against a check by the card's size alone, while another process holds most of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(1e9), int(15.8e9)))
    with pytest.raises(RuntimeError, match=r"of which 14\.8 GB are in use: run it on a larger card, or on the CPU"):
        gpu_memory.check_card("04", "smollm2-135m")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="fills a pretended card")
@pytest.mark.pretend_card("T4")
def test_what_we_hold_ourselves_is_free(monkeypatch):
    """Guards against a set-up cell that, run a second time, refuses the card for the models that its notebook holds."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(1e9), int(15.8e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: int(14e9))
    gpu_memory.check_card("04", "smollm2-135m")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_there_is_nothing_to_refuse():
    """Guards against a set-up cell that refuses the CPU, on which every notebook runs."""
    gpu_memory.check_card("08", "smollm2-135m")
