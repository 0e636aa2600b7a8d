"""The feature layer, and the drafts that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm_latency import models
from llm_latency.models import drafts
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape, load_feature_layer

ROOT = Path(__file__).resolve().parents[1]
SHAPE = FeatureShape(
    hidden=48, intermediate=80, heads=6, kv_heads=2, head_dim=8, rope_theta=1e4, norm_eps=1e-5, positions=64
)


@pytest.fixture
def layer():
    torch.manual_seed(5)
    return FeatureLayer(SHAPE, torch.arange(0, 90, 3)).eval()


def inputs(tokens: int = 12, batch: int = 1):
    generator = torch.Generator().manual_seed(6)
    return (torch.randn(batch, tokens, 48, generator=generator) for _ in range(2))


@torch.inference_mode()
def test_cached_steps_equal_the_whole_text(layer):
    """Chunks of several tokens and single ones, masks and positions: a slip in any makes drafts quietly worse."""
    e, f = inputs()
    whole = layer(e, f, torch.arange(12))
    cache = layer.new_cache(12)
    pieces = [layer(e[:, a:b], f[:, a:b], torch.arange(a, b), cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 12))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert cache.length == 12


@torch.inference_mode()
def test_a_refused_draft_leaves_no_trace(layer):
    """Rolling back kept a refused token's keys visible."""
    e, f = inputs()
    whole = layer(e, f, torch.arange(12))
    cache = layer.new_cache(20)
    layer(e[:, :6], f[:, :6], torch.arange(6), cache)
    layer(e[:, :5] + 3, f[:, :5] - 3, torch.arange(6, 11), cache)
    cache.crop_to(6)
    rest = layer(e[:, 6:], f[:, 6:], torch.arange(6, 12), cache)
    torch.testing.assert_close(rest, whole[:, 6:], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_the_layer_reads_both_token_and_feature_and_never_ahead(layer):
    """A layer deaf to one of its inputs still gives plausible drafts; one that sees ahead trains too well."""
    e, f = inputs()
    whole = layer(e, f, torch.arange(12))
    for changed in ((e.clone(), f), (e, f.clone())):
        mine = changed[0] if changed[1] is f else changed[1]
        mine[:, 7] += 1.0
        other = layer(*changed, torch.arange(12))
        torch.testing.assert_close(other[:, :7], whole[:, :7])
        assert ((other - whole)[:, 7:].abs().amax(dim=-1) > 1e-3).all()


def test_wrong_uses_are_named(layer):
    """A cache set longer than it is, or too short for a text, showed up as garbage drafts."""
    cache = layer.new_cache(4)
    with pytest.raises(ValueError, match="crop_to=1; expected 0 to 0"):
        cache.crop_to(1)
    e, f = inputs()
    with pytest.raises(ValueError, match="12 tokens do not fit into a cache of 4"):
        layer(e, f, torch.arange(12), cache)
    with pytest.raises(ValueError, match="max_length"):
        layer.new_cache(65)
    with pytest.raises(ValueError, match="must rise"):
        FeatureLayer(SHAPE, torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="int64"):
        FeatureLayer(SHAPE, torch.tensor([1.0]))


def test_a_scaled_rotary_embedding_is_refused():
    """A target with scaled positions would be drafted for at the wrong ones."""
    config = models.load_config("smollm2-135m")
    assert FeatureShape.of_config(config).head_dim == 64
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="linear"):
        FeatureShape.of_config(config)


# -- what ships ---------------------------------------------------------------------------------------------------


def test_the_files_are_small_and_say_what_they_are():
    """Weights above the limit, a pickle, or a derived work without its licence must not ship."""
    paths = sorted(path for path in drafts.FOLDER.iterdir() if path.is_file())
    assert [path.name for path in paths] == ["conditioned.safetensors", "plain.safetensors"]
    assert sum(path.stat().st_size for path in paths) < 25_000_000
    for name in (drafts.PLAIN, drafts.CONDITIONED):
        facts = drafts.draft_facts(name)
        assert facts["licence"] == "Apache-2.0" and "SmolLM2-135M-Instruct" in facts["derived_from"]
    card = (ROOT / "docs" / "draft_model_card.md").read_text()
    assert "Apache-2.0" in card and "SmolLM2-135M-Instruct" in card


def test_only_new_weights_are_stored():
    """The target's embedding stored a second time would cost 57 MB and could drift from the target's own."""
    for name in (drafts.PLAIN, drafts.CONDITIONED):
        tensors = drafts.draft_tensors(name)
        assert not [key for key in tensors if "embed" in key or "lm_head" in key]
        assert all(
            key == "head_ids" or (t.dtype == torch.bfloat16 and t.isfinite().all()) for key, t in tensors.items()
        )


def test_the_restricted_heads_name_ids_of_the_vocabulary():
    """An id beyond the vocabulary, one named twice, or no way to draft the end of a text."""
    for ids in (drafts.frequent_ids(), load_feature_layer().head_ids):
        assert ids.dtype == torch.int64 and (ids.diff() > 0).all()
        assert 0 <= int(ids[0]) and int(ids[-1]) < 49152
        assert 2 in ids and 1000 < len(ids) <= 8192


@pytest.mark.model
def test_the_plain_draft_is_an_ordinary_model_with_the_targets_embedding(target):
    """HF's assisted generation and the fast decoder take it as it is; a forgotten weight would be a random one."""
    draft = models.load_draft("smollm2-135m", device="cpu")
    assert type(draft) is type(target) and 1 <= draft.config.num_hidden_layers <= 4
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    stored = drafts.draft_tensors(drafts.PLAIN)
    assert torch.equal(draft.state_dict()["model.norm.weight"], stored["model.norm.weight"].float())


@pytest.mark.long
@pytest.mark.model
@torch.inference_mode()
def test_both_drafts_say_what_the_target_says_more_often_than_not_trained(target, tokenizer):
    """Layers stored in another order, a transposed matrix or a lost norm load without an error and guess nothing."""
    from llm_latency.text.prompt import chat_text, encode_prompt

    ids = torch.tensor([encode_prompt(tokenizer, chat_text(tokenizer, "How do I check if a list has a given number?"))])
    text = target.generate(ids, max_new_tokens=60, do_sample=False)
    hidden = target.model(text).last_hidden_state
    answer = slice(ids.shape[1], text.shape[1] - 1)
    right = text[:, answer.start + 1 :]
    plain = models.load_draft("smollm2-135m", device="cpu")(text).logits.argmax(-1)[:, answer]
    assert (plain == right).float().mean() > 0.4
    layer = load_feature_layer()
    embeddings = target.model.embed_tokens(text[:, 1:])
    out = layer(embeddings, hidden[:, :-1], torch.arange(text.shape[1] - 1))
    column = layer.logits(out, target.lm_head.weight[layer.head_ids]).argmax(-1)  # index t guesses token t + 2
    guessed = layer.head_ids[column][:, answer.start - 1 : answer.stop - 1]
    assert (guessed == right).float().mean() > 0.4
