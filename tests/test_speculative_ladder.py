"""Speculation in the ladder, among the peers and on the command line."""

from __future__ import annotations

import kernel_toys
import pytest
import torch
from safetensors.torch import save_file
from test_speculative_decoder import like, tiny
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond.ladder import rungs, speculation, worker
from every_millisecond.peers import contenders
from every_millisecond.request import quoting_prompt, standard_prompt
from llm_latency import models
from llm_latency.benchmark import respond
from llm_latency.generation import TransformersStepper, generate
from llm_latency.models import drafts
from llm_latency.speculative import ModelDraft, PromptLookupDraft
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape
from llm_latency.text.prompt import encode_prompt

PROMPT = list(range(3, 20))


@pytest.fixture
def small_models(monkeypatch):
    """A tiny target and draft in place of the real ones; the ids are the real tokenizer's."""
    target = tiny(11, vocab_size=49152, hidden_size=16, num_hidden_layers=1, max_position_embeddings=512)
    draft = like(target, 0.02)
    monkeypatch.setattr(models, "load_target", lambda profile=None, dtype=None, **_: target)
    monkeypatch.setattr(models, "load_draft", lambda profile=None, dtype=None, **_: draft)
    monkeypatch.setattr(drafts, "frequent_ids", lambda *_: torch.arange(0, 49152, 3))
    return target, draft


@pytest.fixture
def no_shipped_drafts(monkeypatch, tmp_path):
    monkeypatch.setattr(drafts, "FOLDER", tmp_path)


def test_the_quoting_request_is_as_long_as_the_standard_one(tokenizer):
    """Their times are compared: only the question may differ, and the answer's length is the ladder's."""
    lengths = [len(encode_prompt(tokenizer, make(tokenizer))) for make in (standard_prompt, quoting_prompt)]
    assert lengths == [256, 256]
    standard, quoting = standard_prompt(tokenizer), quoting_prompt(tokenizer)
    assert "word for word" in quoting and "def two_sum" in quoting and standard != quoting
    assert rungs.rung("lookup-quote").prompt is quoting_prompt and rungs.rung("lookup").prompt is standard_prompt


@pytest.mark.parametrize("name", ["lookup", "lookup-quote"])
def test_a_rung_with_prompt_lookup_runs_through_the_harness(name, small_models, tokenizer):
    """Built as the ladder builds it, answered as the ladder answers: tokens counted, scored by the target."""
    rung = rungs.rung(name)
    stepper = rung.build("smollm2-135m")
    response = respond(stepper, tokenizer, rung.prompt(tokenizer), 12)
    assert response.breakdown.tokens_generated == 12 and response.breakdown.prompt_tokens == 256
    assert stepper.score(torch.tensor([PROMPT])).shape == (1, len(PROMPT), 49152)
    assert isinstance(stepper.draft, PromptLookupDraft) and rung.unavailable() is None


def test_missing_draft_weights_are_a_sentence(no_shipped_drafts):
    """A rung, a peer or a command that needs them says what is missing and how to get it."""
    for name in ("speculation", "speculation-int4", "speculation-fp32"):
        assert "conditioned draft's weights are missing" in rungs.rung(name).unavailable()
    assert "plain draft's weights are missing" in contenders.contender("speculative-plain").unavailable("smollm2-135m")
    assert "another model" in contenders.contender("speculative").unavailable("qwen2.5-7b")


def test_the_command_says_in_one_line_what_it_cannot_do(small_models, no_shipped_drafts):
    """No traceback where weights are missing or a name is wrong."""
    for arguments, named in (([], "is missing"), (["--draft", "lookup", "--gammas", "0"], "num_speculative=0")):
        result = CliRunner().invoke(
            cli.app, ["speculate", "--profile", "smollm2-135m", "--weights", "float32", *arguments]
        )
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert named in " ".join(result.stderr.split())


def test_the_command_measures_and_explains(small_models):
    """End to end with prompt lookup: a table of gammas and the verdict in words."""
    arguments = ["--draft", "lookup", "--weights", "float32", "--gammas", "1,2", "--tokens", "8", "--rounds", "1"]
    result = CliRunner().invoke(
        cli.app, ["speculate", "--question", "Count to ten.", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0 and "gamma" in result.stdout
    assert "acceptance" in result.stdout and "- It " in result.stdout


@pytest.mark.parametrize("draft", ["plain", "conditioned", "lookup"])
def test_every_draft_guesses_for_the_fast_decoder(draft, small_models, monkeypatch):
    """Each kind built for the profile's target; the text is the target's whichever it is."""
    target, _ = small_models
    layer = FeatureLayer(FeatureShape.of_config(target.config), torch.arange(0, 49152, 7)).eval()
    monkeypatch.setattr("every_millisecond.ladder.speculation.load_feature_layer", lambda **_: layer)
    decoder = speculation.build("smollm2-135m", "float32", draft)
    kinds = dict(plain=ModelDraft, conditioned=ConditionedDraft, lookup=PromptLookupDraft)
    assert isinstance(decoder.draft, kinds[draft])
    ids = torch.tensor([PROMPT])
    plain = generate(TransformersStepper(target), ids, 15).sequences
    assert torch.equal(decoder.generate(ids, 15).sequences, plain)


@pytest.fixture(scope="module")
def kernel_directory(tmp_path_factory):
    """A model on the kernel's grid with a conditioned draft of its own, as a folder."""
    folder = tmp_path_factory.mktemp("kernel-model")
    shape = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)
    model = kernel_toys.round_in_place(tiny(11, vocab_size=49152, max_position_embeddings=512, **shape))
    model.save_pretrained(folder)
    models.load_tokenizer("smollm2-135m").save_pretrained(folder)
    layer = FeatureLayer(FeatureShape.of_config(model.config), torch.arange(0, 49152, 7))
    save_file(layer.state_dict(), folder / speculation.OWN_DRAFT)
    return str(folder)


@kernel_toys.needs_kernel()
@pytest.mark.parametrize("name", ["kernel", "kernel-prefix", "kernel-speculation", "kernel-everything", "kernel-int8"])
def test_the_kernels_rungs_answer_with_fp32s_text(name, kernel_directory, tokenizer):
    """Guards against a rung that measures another decoder than its title says, and a folder's own draft passed over."""
    entry = rungs.rung(name)
    stepper = entry.build(kernel_directory)
    response = respond(stepper, tokenizer, entry.prompt(tokenizer), 12)
    if entry.activations == "int16":
        plain = respond(rungs.rung(rungs.BASELINE).build(kernel_directory), tokenizer, entry.prompt(tokenizer), 12)
        assert torch.equal(response.sequences, plain.sequences)
    assert bool(stepper.prefix_tokens) == (name in ("kernel-prefix", "kernel-everything"))
    assert entry.record("measured").activations == entry.activations


@pytest.mark.long
@kernel_toys.needs_kernel()
def test_a_rungs_twins_tell_launches_rates_and_the_draft(kernel_directory, tmp_path):
    """Guards against a speculative rung whose prediction lacks its draft, and twins that only some decoders take."""
    options = dict(warmup=0, repeats=1, budget_s=1.0, folder=tmp_path, with_quality=True, new_tokens=12)
    for name in (rungs.BASELINE, "int8-dynamic", "kernel-everything"):
        found = worker.measure_rung(name, kernel_directory, **options)
        assert found.measured and found.launch_ms > 0 and set(found.rates) == {"prefill", "pass"}, name
        assert found.step_bytes > 0 and found.perplexity > 1
    assert found.rows_per_pass > 1 and found.draft_bytes > 0 and found.draft_prefill_ms > 0
    assert found.kept_tokens > 100 and found.agreement > 0.9


def test_a_directory_is_a_draft_and_other_profiles_have_no_conditioned_one(small_models, tmp_path, monkeypatch):
    """A learner's own small model; and the shipped layer fits one target alone."""
    assert isinstance(speculation.load_draft("smollm2-135m", small_models[0], str(tmp_path)), ModelDraft)
    with pytest.raises(ValueError, match="distilled for smollm2-135m"):
        speculation.load_draft(str(tmp_path), small_models[0], "conditioned")


def test_transformers_assisted_generation_is_a_peer_with_the_same_draft(small_models):
    """Same weights, same prompt, same number of tokens, same text: or the ratio would compare nothing."""
    theirs = contenders._hf_assisted(torch.float32)("smollm2-135m")(PROMPT, 12)
    ours = contenders._stepper(speculation.build("smollm2-135m", "float32", "plain"))(PROMPT, 12)
    assert len(theirs.ids) == len(ours.ids) == 12
    if small_models[0].config.eos_token_id not in ours.ids:  # forbidden to theirs, so that all answers have one length
        assert theirs.ids == ours.ids
    assert min(theirs.prefill_ms, theirs.decode_ms, ours.prefill_ms, ours.decode_ms) > 0


@pytest.mark.parametrize("default, draft", [(True, "conditioned"), (False, "plain")])
def test_a_rung_takes_the_draft_that_its_profile_has(monkeypatch, default, draft):
    """Guards against a bar on a larger model that raises, since the conditioned draft was distilled for the default."""
    monkeypatch.setattr(speculation, "_is_default", lambda profile: default)
    monkeypatch.setattr(speculation, "load_fast", lambda *_, **__: (None, None))
    monkeypatch.setattr(speculation, "load_draft", lambda profile, model, draft: draft)
    monkeypatch.setattr(speculation, "SpeculativeDecoder", lambda target, draft, gamma: (draft, gamma))
    assert speculation.build(None, "int4", "conditioned") == (draft, 3)
