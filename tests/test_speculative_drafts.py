"""The drafts by themselves: what they propose, from what distribution, and that rejected tokens leave no trace."""

from __future__ import annotations

import pytest
import torch
from speculative_toys import Markov, random_table
from transformers import LlamaConfig, LlamaForCausalLM

from llm_latency.engine import FastDecoder
from llm_latency.generation import TransformersStepper, generate
from llm_latency.speculative import ModelDraft, PromptLookupDraft, SamplingRule, SpeculativeDecoder
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape

GREEDY = SamplingRule(10)


def lookup(text: list[int], **options) -> PromptLookupDraft:
    draft = PromptLookupDraft(**options)
    draft.begin(torch.tensor([text[:-1]]), text[-1], 100)
    return draft


def proposed(draft, count: int = 4, rule: SamplingRule = GREEDY) -> list[int]:
    return draft.propose(count, rule).tokens.tolist()


# -- prompt lookup ------------------------------------------------------------------------------------------------


def test_prompt_lookup_proposes_what_followed():
    """The longest known suffix wins, its latest occurrence counts, and a suffix is never found at its own place."""
    assert proposed(lookup([1, 2, 3, 4, 5, 1, 2])) == [3, 4, 5, 1]
    assert proposed(lookup([1, 2, 3, 9, 2, 4, 7, 1, 2])) == [3, 9, 2, 4]  # "1 2" before the later "2"
    assert proposed(lookup([1, 2, 3, 1, 2, 4, 1, 2])) == [4, 1, 2]  # the latest occurrence
    assert proposed(lookup([1, 2, 3])) == [] and proposed(lookup([5, 5])) == [5]
    assert proposed(lookup([1, 2, 3, 2], min_ngram=2)) == []
    assert proposed(lookup([1, 2, 3, 2], max_ngram=1), count=1) == [3]
    assert proposed(lookup([0, 7, 0])) == [7, 0]  # token 0 is a token


def test_prompt_lookup_learns_what_is_committed():
    """The answer quotes itself as well as the prompt; what was proposed and refused was never there."""
    draft = lookup([1, 2, 3, 1])
    assert proposed(draft) == [2, 3, 1] and draft.length == 3
    draft.commit([6, 1])
    assert draft.length == 5 and proposed(draft) == [6, 1]
    draft.begin(torch.tensor([[4]]), 1, 100)
    assert proposed(draft) == [] and draft.length == 1


def test_prompt_lookup_is_certain_of_what_it_proposes():
    """Its tokens come from one-hot distributions: any other q would bend the output."""
    proposal = lookup([1, 2, 3, 1]).propose(2, SamplingRule(10, temperature=1.0))
    assert proposal.tokens.tolist() == [2, 3]
    assert torch.equal(proposal.probs, torch.eye(10)[[2, 3]])


@pytest.mark.parametrize(("options", "error"), [
    (dict(max_ngram=0), ValueError), (dict(max_ngram=2, min_ngram=3), ValueError), (dict(max_ngram=2.0), TypeError),
])  # fmt: skip
def test_prompt_lookup_options(options, error):
    """An n-gram of no tokens is found everywhere."""
    with pytest.raises(error, match="_ngram="):
        PromptLookupDraft(**options)


# -- a model ------------------------------------------------------------------------------------------------------


def test_model_draft_reports_what_it_sampled_from():
    """Case 8: after the same temperature and filters; the tokens lie inside what the filters left."""
    table = random_table(10, 3)
    draft = ModelDraft(Markov(table))
    rule = SamplingRule(10, temperature=0.5, top_k=3, generator=torch.Generator().manual_seed(1))
    draft.begin(torch.tensor([[4, 2]]), 7, 50)
    proposal = draft.propose(4, rule)
    before = [7, *proposal.tokens[:-1].tolist()]
    torch.testing.assert_close(proposal.probs, rule.probabilities(table[before]))
    assert bool((proposal.probs.gather(1, proposal.tokens[:, None]) > 0).all())
    assert draft.propose(2, GREEDY).probs is None


def test_a_head_of_few_rows_names_the_right_ids():
    """A fast decoder whose head keeps some rows gives logits by column: column 0 is the first kept id, not id 0."""
    model = small_llama(3, vocab_size=40)
    ids = torch.tensor([3, 8, 11, 20, 39])
    few, whole = FastDecoder.from_model(model, head_ids=ids), FastDecoder.from_model(model)
    text = torch.tensor([[1, 9, 30]])
    draft = ModelDraft(few)
    draft.begin(text, 5, 50)
    whole.prefill(text)
    expected = whole.step(torch.tensor([[5]]))[0, -1]
    assert draft.propose(1, SamplingRule(40)).tokens.tolist() == [int(ids[expected[ids].argmax()])]
    draft.stepper.crop_to(3)
    probs = draft.propose(1, SamplingRule(40, temperature=1.0)).probs
    torch.testing.assert_close(probs[0, ids], expected[ids].softmax(-1), rtol=1e-4, atol=1e-5)
    assert float(probs.sum()) == pytest.approx(1) and int((probs > 0).sum()) == 5
    with pytest.raises(ValueError, match="cut to head_ids"):
        SpeculativeDecoder(few, PromptLookupDraft())


# -- conditioned on the target's features -------------------------------------------------------------------------


def small_llama(seed: int, **changes) -> LlamaForCausalLM:
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(vocab_size=5, num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False) | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model


def conditioned(model: LlamaForCausalLM, ids: list[int], seed: int = 0) -> ConditionedDraft:
    torch.manual_seed(seed)
    layer = FeatureLayer(FeatureShape.of_config(model.config), torch.tensor(ids)).eval()
    return ConditionedDraft.for_model(layer, model)


def keeping(model: LlamaForCausalLM) -> TransformersStepper:
    stepper = TransformersStepper(model)
    stepper.keep_features()
    return stepper


def true_features(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(torch.tensor([ids])).last_hidden_state  # [1, n, hidden]


@pytest.mark.parametrize("fast", [False, True])
def test_features_are_the_last_hidden_states(fast):
    """Of the whole prompt, then of each step's tokens: what the draft was trained on, after the final norm."""
    model = small_llama(1)
    reader = FastDecoder.from_model(model) if fast else keeping(model)
    text = [1, 4, 2, 0, 3, 3, 1]
    expected = true_features(model, text)[0]
    reader.prefill(torch.tensor([text[:4]]))
    torch.testing.assert_close(reader.features, expected[:4], rtol=1e-4, atol=1e-4)
    reader.step(torch.tensor([text[4:]]))
    torch.testing.assert_close(reader.features, expected[4:], rtol=1e-4, atol=1e-4)
    assert not model.model._forward_hooks, "the learner's model must be left as it was"


@pytest.mark.parametrize("fast", [False, True])
def test_conditioned_draft_keeps_true_features_only(fast):
    """Drafting feeds the layer its own features; after verification its cache must hold the entries that the target's
    true features give, and nothing of what was drafted, whether accepted or refused."""
    model = small_llama(2)
    target = FastDecoder.from_model(model) if fast else model
    decoder = SpeculativeDecoder(target, conditioned(model, [0, 1, 2, 3, 4]), 3)
    layer, kinds = decoder.draft.layer, set()
    numbers = torch.Generator().manual_seed(0)
    request = decoder.start(torch.tensor([[3, 1, 4, 1]]), 100, temperature=2.0, generator=numbers)
    while not request.done:
        kinds.add(decoder.cycle(request).accepted)
        text = request.sequence
        assert decoder.draft.length == decoder.target.length == len(text) - 1
        features = true_features(model, text[:-1])
        cache = layer.new_cache(128)
        with torch.inference_mode():
            embeddings = model.get_input_embeddings()(torch.tensor([text[1:]]))
            ahead = layer(embeddings, features, torch.arange(len(text) - 1), cache)[:, -1:]
        torch.testing.assert_close(decoder.draft.ahead, ahead, rtol=1e-3, atol=1e-3)
        held = decoder.draft.length
        for mine, true in zip(decoder.draft.cache.read(held), cache.read(held), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-3)
    assert 0 in kinds and max(kinds) > 1, "with five tokens and a high temperature a random draft is right now and then"


def test_conditioned_draft_leaves_out_what_it_cannot_name():
    """Probability 0 outside its head: the target may still choose such a token, and the text is the target's."""
    model = small_llama(4, vocab_size=9)
    draft = conditioned(model, [1, 4, 6])
    ids = torch.tensor([[3, 1, 4, 1]])
    output = SpeculativeDecoder(model, draft, 2).generate(ids, 40)
    plain = generate(TransformersStepper(model), ids, 40).sequences
    assert torch.equal(output.sequences, plain) and set(plain[0, 4:].tolist()) - {1, 4, 6}
    reader = keeping(model)
    with torch.inference_mode():
        reader.prefill(ids)
        draft.begin(ids, 2, 40, reader.features)
        proposal = draft.propose(3, SamplingRule(9, temperature=1.0, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(3))
    assert float(proposal.probs[:, [0, 2, 3, 5, 7, 8]].abs().max()) == 0
    assert set(proposal.tokens.tolist()) <= {1, 4, 6}


def test_conditioned_draft_in_bfloat16_on_a_float32_target():
    """A smaller draft format moves the acceptance alone."""
    model = small_llama(2)
    torch.manual_seed(0)
    layer = FeatureLayer(FeatureShape.of_config(model.config), torch.arange(5)).eval().to(torch.bfloat16)
    ids = torch.tensor([[3, 1, 4, 1]])
    output = SpeculativeDecoder(model, ConditionedDraft.for_model(layer, model), 3).generate(ids, 30)
    assert torch.equal(output.sequences, generate(TransformersStepper(model), ids, 30).sequences)


def test_a_quantised_conditioned_draft():
    """INT8 moves the acceptance alone, leaves the given layer as it was, and counts fewer bytes."""
    model = small_llama(2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    plain = conditioned(model, [0, 1, 2, 3, 4])
    before = {name: value.clone() for name, value in plain.layer.state_dict().items()}
    quantised = ConditionedDraft.for_model(plain.layer, model, weights="int8")
    assert all(torch.equal(before[name], value) for name, value in plain.layer.state_dict().items())
    layer = sum(p.nbytes for p in plain.layer.parameters())
    assert plain.step_bytes == layer + 5 * 64 * 4 + 64 * 4
    assert quantised.step_bytes < 0.5 * plain.step_bytes
    ids = torch.tensor([[3, 1, 4, 1]])
    output = SpeculativeDecoder(model, quantised, 3).generate(ids, 30)
    assert torch.equal(output.sequences, generate(TransformersStepper(model), ids, 30).sequences)
    reader = keeping(model)
    reader.prefill(ids)
    with torch.inference_mode():
        for draft in (plain, quantised):
            draft.begin(ids, 2, 40, reader.features)
    torch.testing.assert_close(quantised.ahead, plain.ahead, rtol=0.1, atol=0.1)


def test_a_head_that_does_not_fit_is_named():
    """Rows for other ids than the layer's would name wrong tokens without an error."""
    model = small_llama(2)
    layer = FeatureLayer(FeatureShape.of_config(model.config), torch.arange(3))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with pytest.raises(ValueError, match=r"expected embedding \[vocab, hidden\] and head \[3, hidden\]"):
        ConditionedDraft(layer, embedding, head)
    with pytest.raises(ValueError, match="head_ids holds 2; expected ids from 0 to 1"):
        ConditionedDraft(layer, embedding[:2], head[:3])


def test_a_conditioned_draft_of_other_sizes():
    """Guards against sizes that fail in the middle of a request, in words of another library."""
    model = small_llama(2)
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    shorter = conditioned(small_llama(4, vocab_size=vocab - 2), [0, 1, 2])
    ids = torch.tensor([[vocab - 1, 1, vocab - 2, 1]])
    output = SpeculativeDecoder(model, shorter, 3).generate(ids, 20)
    assert torch.equal(output.sequences, generate(TransformersStepper(model), ids, 20).sequences)
    with pytest.raises(ValueError, match=f"features are {hidden} wide and this draft's {2 * hidden}"):
        SpeculativeDecoder(model, conditioned(small_llama(4, hidden_size=2 * hidden), [0, 1])).generate(ids, 5)
    with pytest.raises(ValueError, match="may grow to 24 tokens; this draft reads texts of up to 16"):
        SpeculativeDecoder(model, conditioned(small_llama(4, max_position_embeddings=16), [0, 1])).generate(ids, 20)
