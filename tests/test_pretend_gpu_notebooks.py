"""Every notebook on the pretend GPU, and the harness that plays them: a cell that raises is found, child or not.

`make test-long` plays two notebooks on one profile; each takes minutes. The others, and the other profiles, are played
by hand: `python tests/pretend_gpu/notebooks.py --profile NAME` (docs/gpu.md says what was).
"""

from __future__ import annotations

import nbformat
import pytest
import torch
from pretend_gpu import notebooks, stage

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is here: run the notebooks on it")

SET_UP = """
import subprocess, sys, torch
from llm_latency import models
model, draft = models.load_target(), models.load_draft()
tokenizer, config = models.load_tokenizer(), models.load_config()
ids = torch.tensor([tokenizer.encode("Two numbers")], device=model.device)
assert model(ids).logits.is_cuda and draft.device == model.device and model.dtype == {dtype}
"""
CHILD = """
asks = "import torch; from llm_latency import models as m; print(m.load_config().vocab_size, torch.cuda.is_available())"
said = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout
assert said.split() == [str(config.vocab_size), "True"], said
"""


@pytest.mark.parametrize(
    "profile, dtype",
    [
        pytest.param("qwen2.5-7b", "torch.bfloat16", marks=pytest.mark.long),
        pytest.param("smollm2-1.7b", "torch.float16", marks=pytest.mark.long),
    ],
    ids=lambda x: x,
)
def test_breaks_are_found_and_the_cells_behind_them_run(tmp_path, profile, dtype):
    """Guards against a harness that stops at a break, misses one, or leaves a notebook's child processes on the CPU."""
    cells = [SET_UP.format(dtype=dtype), "model(ids.cpu())", "model.lm_head.weight.detach().numpy()", CHILD]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    path = tmp_path / "99_planted.ipynb"
    nbformat.write(notebook, path)
    (played,) = notebooks.play([path], profile, seconds=300)
    breaks = played.breaks
    assert [found.cell for found in breaks] == [1, 2], breaks
    assert "same device" in breaks[0].error and "numpy" in breaks[1].error


def test_tiny_models_keep_the_awkward_numbers():
    """Guards against tiny models so round that nothing can break on them."""
    target, draft = (stage.tiny_config(f"Qwen/Qwen2.5-{size}-Instruct") for size in ("7B", "0.5B"))
    assert target.vocab_size > draft.vocab_size > stage.TOKENIZER
    assert target.num_attention_heads == 7 and target.num_key_value_heads == 1 and not hasattr(target, "head_dim")
    assert target.intermediate_size % 256 and target.hidden_size % 96 and not target.tie_word_embeddings


def test_every_notebook_is_found():
    """Guards against a harness that plays nothing."""
    assert len(notebooks.notebook_paths()) >= 15
    assert [path.name[:2] for path in notebooks.notebook_paths(["07", "04"])] == ["04", "07"]


PLAYS = [pytest.param("qwen2.5-7b", number, marks=pytest.mark.long) for number in ("00", "01")]


@pytest.fixture(scope="module")
def played(request, tmp_path_factory) -> dict[str, notebooks.Played]:
    """What became of the notebooks that are asked for, on a profile, one after the other as a reader takes them."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    numbers = {params["number"] for params in calls if params.get("played") == request.param}
    paths = notebooks.notebook_paths(sorted(numbers))
    found = notebooks.play(paths, request.param, kept=tmp_path_factory.mktemp("kept"))
    return {one.notebook[:2]: one for one in found}


@pytest.mark.parametrize("played, number", PLAYS, indirect=["played"])
def test_no_cell_of_a_notebook_raises(played, number):
    """Guards against cells that only a GPU reaches, and that no machine of ours has ever run."""
    assert not played[number].breaks and played[number].seconds, str(played[number])
