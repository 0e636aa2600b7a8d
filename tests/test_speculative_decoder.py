"""The whole decoder: the target's own output, exact caches, ends and limits, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from speculative_toys import Markov, chain, chi_square_p, random_table
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from llm_latency.benchmark import respond
from llm_latency.engine import FastDecoder
from llm_latency.generation import TransformersStepper, generate
from llm_latency.speculative import (
    Cycle,
    PromptLookupDraft,
    SpeculativeDecoder,
    residual,
    verify,
)
from llm_latency.speculative import decoder as decoder_module
from llm_latency.timing import LatencyTimer

PROMPT = torch.tensor([[5, 1, 3, 5, 1, 2, 0, 7]])


def tiny(seed: int, **changes) -> LlamaForCausalLM:
    """A random Llama over 97 ids whose argmax does not rest on rounding."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True) | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def like(model: LlamaForCausalLM, noise: float, seed: int = 1) -> LlamaForCausalLM:
    """A draft that often agrees: the same weights with noise."""
    draft = LlamaForCausalLM(model.config).eval()
    draft.load_state_dict(model.state_dict())
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=numbers))
    return draft


def prompt(n: int, seed: int, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair():
    target = tiny(11)
    return target, like(target, 0.08)


# -- the target's own output --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_greedy_equals_plain_decoding_whatever_the_draft(gamma):
    """Case 7: at temperature 0 the draft's opinion must never reach the output, right or wrong as it may be."""
    target = Markov(random_table(23, 1))
    mixed = torch.where(
        torch.rand(23, 1, generator=torch.Generator().manual_seed(5)) < 0.6, target.table, -target.table
    )
    plain = generate(target, PROMPT, 40).sequences
    for draft in (Markov(random_table(23, 2)), Markov(mixed), Markov(target.table), PromptLookupDraft()):
        output = SpeculativeDecoder(target, draft, gamma).generate(PROMPT, 40)
        assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("fast", [False, True])
def test_greedy_equals_plain_decoding_on_transformers_and_the_fast_decoder(pair, fast):
    """FP32, 60 prompts: guards against a cache rolled back wrong, which later tokens then attend to."""
    target, small = pair
    plain = TransformersStepper(target)
    make = FastDecoder.from_model if fast else TransformersStepper
    decoder = SpeculativeDecoder(make(target), make(small), 4)
    accepted = proposed = 0
    for seed in range(60):
        ids = prompt(3 + seed % 30, seed)
        output = decoder.generate(ids, 20)
        assert torch.equal(output.sequences, generate(plain, ids, 20).sequences)
        accepted, proposed = accepted + output.accepted, proposed + output.proposed
    assert 0.1 < accepted / proposed < 0.95, "the draft must be right at times and wrong at times, or little is tested"


def test_greedy_equals_plain_decoding_with_qwen2(tiny_qwen2):
    """Another family, untied and with biases, and a target that is its own draft's better half."""
    ids = prompt(17, 3)
    output = SpeculativeDecoder(tiny_qwen2, like_qwen(tiny_qwen2), 3).generate(ids, 30)
    assert torch.equal(output.sequences, generate(TransformersStepper(tiny_qwen2), ids, 30).sequences)


def like_qwen(model):
    import copy

    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.lm_head.weight.add_(
            0.5 * torch.randn(draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    return draft


def test_a_sliding_window_survives_taking_tokens_back():
    """A window's cache drops what lies behind it; taken back across, it would have to return. Ours keeps everything."""
    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=8,
    )  # fmt: skip
    target = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    ids = prompt(13, 2)
    plain = generate(TransformersStepper(target), ids, 30).sequences
    output = SpeculativeDecoder(target, tiny(3), 4).generate(ids, 30)
    assert torch.equal(output.sequences, plain)


@pytest.mark.long
@pytest.mark.model
def test_greedy_equals_plain_decoding_on_the_real_model(target, tokenizer):
    """FP32: with a matrix of other shape a sum may round another way, so a divergence is allowed only where
    the target's two best choices lie within that rounding (case 13)."""
    from llm_latency.text.prompt import chat_text, encode_prompt

    stepper = FastDecoder.from_model(target)
    decoder = SpeculativeDecoder(stepper, PromptLookupDraft(), 4)
    accepted = 0
    for i in range(4):
        ids = torch.tensor([encode_prompt(tokenizer, chat_text(tokenizer, f"Write this again: {i} {i + 2} {i + 4}"))])
        plain = generate(stepper, ids, 10).sequences[0].tolist()
        output = decoder.generate(ids, 10)
        accepted += output.accepted
        found = output.sequences[0].tolist()
        if found != plain:
            at = next(j for j, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b)
            best = stepper.prefill(torch.tensor([plain[:at]])).topk(2).values[0]
            assert float(best[0] - best[1]) < 1e-3, f"prompt {i} diverges at {at}"
    assert accepted > 0


def test_draft_equal_to_the_target_is_accepted_whole(pair):
    """Case 9: under greedy every proposal stands, and n tokens take n / (gamma + 1) passes."""
    target, _ = pair
    output = SpeculativeDecoder(target, FastDecoder.from_model(target), 4).generate(prompt(9, 1), 21)
    assert output.acceptance_rate == output.alpha == 1 and output.tokens_per_cycle == 5
    assert output.cycles == (Cycle(4, 4, 5),) * 4


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_caches_hold_the_committed_sequence_less_its_last_token(temperature):
    """Case 9, token by token, after every cycle: whether nothing, some or everything was accepted."""
    table = random_table(11, 1)
    # A draft that agrees on about three quarters of the tokens.
    mixed = torch.where(torch.rand(11, 1, generator=torch.Generator().manual_seed(3)) < 0.75, table, table.roll(1, 1))
    decoder = SpeculativeDecoder(Markov(table), Markov(mixed), 3)
    kinds = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        request = decoder.start(prompt(4, seed, 11), 30, temperature=temperature, generator=generator)
        while not request.done:
            cycle = decoder.cycle(request)
            kinds.add(cycle.accepted)
            assert decoder.target.text == request.sequence[:-1]
            assert decoder.draft.stepper.text == request.sequence[:-1]
            assert decoder.target.length == decoder.draft.length == len(request.sequence) - 1
        with pytest.raises(RuntimeError, match="done"):
            decoder.cycle(request)
    assert kinds == {0, 1, 2, 3}


@pytest.mark.parametrize("fast", [False, True])
def test_what_the_caches_hold_is_what_a_fresh_pass_would(pair, fast):
    """Lengths may be right and keys wrong: the next logits must be those of the committed text read anew."""
    target, small = pair
    make = FastDecoder.from_model if fast else TransformersStepper
    decoder = SpeculativeDecoder(make(target), make(small), 4)
    request = decoder.start(prompt(7, 5), 30)
    while not request.done:
        decoder.cycle(request)
        for reader, model in ((decoder.target, target), (decoder.draft.stepper, small)):
            last = torch.tensor([request.sequence[-1:]])
            found = reader.step(last)[0, -1]
            reader.crop_to(reader.length - 1)
            with torch.inference_mode():
                expected = model(torch.tensor([request.sequence])).logits[0, -1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_next_request_starts_afresh(pair):
    """Guards against a memory of the last request in target, draft or n-gram table."""
    target, small = pair
    for draft in (small, PromptLookupDraft()):
        decoder = SpeculativeDecoder(target, draft, 3)
        first = decoder.generate(prompt(9, 1), 15)
        decoder.generate(prompt(12, 2), 15)
        again = decoder.generate(prompt(9, 1), 15)
        assert torch.equal(first.sequences, again.sequences) and first.cycles == again.cycles


# -- ends and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agree", [True, False])
def test_end_of_text_inside_a_draft(agree):
    """Case 10: nothing behind the end is returned or counted, whether the draft saw the end coming or not."""
    successors = [1, 2, 3, 4, 5, 6, 7, 0]  # 5 -> 6 -> 7 -> 0 -> 1 -> ...
    target = Markov(chain(successors))
    draft = Markov(chain(successors if agree else [1, 2, 3, 4, 5, 6, 7, 5]))
    output = SpeculativeDecoder(target, draft, 5).generate(torch.tensor([[4]]), 30, eos_token_id=7)
    assert output.sequences.tolist() == [[4, 5, 6, 7]]  # 5 from the prompt's pass; 6, 7 drafted as tokens 1 and 2 of 5
    assert (output.proposed, output.accepted, output.tokens_per_cycle) == (2, 2, 2)
    assert output.cycles[0].tokens == 2


def test_end_of_text_as_first_token_and_as_the_targets_own():
    """The end may come from the prompt's pass, which no cycle follows, or replace a rejected token."""
    target = Markov(chain([1, 2, 3, 0]))
    output = SpeculativeDecoder(target, Markov(chain([1, 2, 3, 0])), 2).generate(torch.tensor([[1]]), 9, eos_token_id=2)
    assert output.sequences.tolist() == [[1, 2]] and output.cycles == ()
    assert output.acceptance_rate is None and output.alpha is None and output.tokens_per_cycle is None
    wrong = Markov(chain([1, 2, 2, 0]))
    output = SpeculativeDecoder(target, wrong, 2).generate(torch.tensor([[0]]), 9, eos_token_id=3)
    assert output.sequences.tolist() == [[0, 1, 2, 3]]
    assert output.accepted == 1 and output.proposed == 2


@pytest.mark.parametrize("new", [1, 2, 3, 6, 7, 13])
def test_exactly_max_new_tokens(new):
    """Case 11: gamma 5 must not overshoot, nor the last cycle draft what cannot be used."""
    target = Markov(chain([1, 2, 3, 4, 0]))
    output = SpeculativeDecoder(target, Markov(target.table), 5).generate(torch.tensor([[0]]), new)
    assert output.sequences[0].tolist() == [i % 5 for i in range(new + 1)]
    assert output.accepted == output.proposed and sum(c.tokens for c in output.cycles) == new - 1


def test_token_zero_is_a_token_like_any_other():
    """Case 14: a text of zeros, drafted and accepted."""
    target = Markov(chain([0, 0]))
    output = SpeculativeDecoder(target, Markov(target.table), 3).generate(torch.tensor([[0]]), 9)
    assert output.sequences[0].tolist() == [0] * 10 and output.acceptance_rate == 1


def test_a_full_context_is_used_to_its_last_position(pair):
    """The verification of gamma + 1 tokens must not need positions that plain decoding does not."""
    target = tiny(11, max_position_embeddings=32)
    ids = prompt(20, 1)
    output = SpeculativeDecoder(FastDecoder.from_model(target), like(target, 0.05), 5).generate(ids, 12)
    assert torch.equal(output.sequences, generate(TransformersStepper(target), ids, 12).sequences)


@pytest.mark.parametrize("draft_positions", [4, 12, 14])
def test_a_draft_with_a_shorter_context_stops_drafting(draft_positions):
    """The target goes on alone where the draft's context is full, or was too short for the prompt."""
    target = Markov(chain([1, 2, 3, 4, 0]))
    draft = Markov(target.table, max_positions=draft_positions)
    output = SpeculativeDecoder(target, draft, 3).generate(torch.tensor([[0, 1, 2, 3, 4, 0]]), 20)
    assert output.sequences[0, 6:].tolist() == [i % 5 for i in range(1, 21)]
    assert output.cycles[-1].proposed == 0
    assert (output.proposed > 0) == (draft_positions > 6)


# -- sampling -----------------------------------------------------------------------------------------------------


def transitions_p_value(decoder: SpeculativeDecoder, cycles: int = 7_000, **sampling) -> float:
    """Of the text that many cycles write: does each token follow the last one as the target's table says?"""
    table, vocab = decoder.target.table, decoder.vocab_size
    generator = torch.Generator().manual_seed(17)
    request = decoder.start(torch.tensor([[0]]), 5 * cycles, generator=generator, **sampling)
    while len(request.cycles) < cycles:
        decoder.cycle(request)
    pairs = torch.tensor(request.sequence[:-1]) * vocab + torch.tensor(request.sequence[1:])
    counts = torch.bincount(pairs, minlength=vocab * vocab).view(vocab, vocab)
    temperature, top_k, top_p = sampling["temperature"], sampling.get("top_k"), sampling.get("top_p")
    from llm_latency.sampling import probabilities

    return chi_square_p(counts, probabilities(table, temperature, top_k, top_p))


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(dict(temperature=1.0), id="plain"),
        pytest.param(dict(temperature=0.7, top_k=4), id="top-k", marks=pytest.mark.long),
        pytest.param(dict(temperature=1.3, top_p=0.8), id="top-p", marks=pytest.mark.long),
    ],
)
def test_sampling_is_distributed_as_the_targets(sampling):
    """Over 21,000 cycles of the complete decoder in all, filters on: every token follows the target's distribution,
    though the draft's is another (a chi-square test at 0.001)."""
    decoder = SpeculativeDecoder(Markov(random_table(6, 1)), Markov(random_table(6, 2)), 2)
    assert transitions_p_value(decoder, **sampling) > 0.001


def _residual_is_the_target(tokens, q, p, uniforms):
    accepted, _ = verify(tokens, q, p, uniforms)
    return accepted, p[accepted]


def _accepts_what_the_target_likes(tokens, q, p, uniforms):
    rows = torch.arange(len(tokens))
    accepted = int((uniforms < p[rows, tokens]).long().cumprod(0).sum())
    return accepted, p[-1] if accepted == len(tokens) else residual(p[accepted], q[accepted])


def _assumes_a_uniform_draft(tokens, q, p, uniforms):
    return verify(tokens, torch.full_like(q, 1 / q.shape[1]), p, uniforms)


@pytest.mark.parametrize(
    "wrong",
    [
        _residual_is_the_target,
        pytest.param(_accepts_what_the_target_likes, marks=pytest.mark.long),
        pytest.param(_assumes_a_uniform_draft, marks=pytest.mark.long),
    ],
)
def test_the_same_test_finds_wrong_rules(wrong, monkeypatch):
    """Three planted faults inside the decoder: the test above must fail for each, or it proves nothing."""
    monkeypatch.setattr(decoder_module, "verify", wrong)
    decoder = SpeculativeDecoder(Markov(random_table(6, 1)), Markov(random_table(6, 2)), 2)
    assert transitions_p_value(decoder, cycles=4_000, temperature=1.0) < 0.001


def test_prompt_lookup_keeps_the_distribution():
    """Its q is one-hot: a token is accepted with the target's own probability."""
    decoder = SpeculativeDecoder(Markov(random_table(6, 1)), PromptLookupDraft(2), 2)
    assert transitions_p_value(decoder, cycles=3_000, temperature=1.0) > 0.001


def test_a_generator_makes_it_repeatable(pair):
    """The same seed, the same text; another seed, another one."""
    decoder = SpeculativeDecoder(*pair, 3)
    options = dict(temperature=1.0, top_k=20, top_p=0.9)
    texts = [
        decoder.generate(prompt(6, 1), 20, **options, generator=torch.Generator().manual_seed(seed)).sequences.tolist()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_acceptance_is_the_overlap_of_the_distributions():
    """alpha measured on one pair of rows is their overlap: 0.7 for case 8's pair; a proposal behind a rejection was
    never tested, so the plain rate lies below."""
    p, q = (torch.tensor(row).log().expand(3, 3) for row in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    decoder = SpeculativeDecoder(Markov(p), Markov(q), 3)
    output = decoder.generate(torch.tensor([[0]]), 4000, temperature=1.0, generator=torch.Generator().manual_seed(2))
    assert output.alpha == pytest.approx(0.7, abs=0.03)
    assert output.tokens_per_cycle == pytest.approx(2.533, abs=0.1)
    assert output.acceptance_rate == pytest.approx(1.533 / 3, abs=0.03)


# -- the harness --------------------------------------------------------------------------------------------------


def test_it_is_a_stepper_for_respond_and_quality(pair, tokenizer):
    """The ladder answers and scores through it: tokens counted as ids, stages timed, quality the target's."""
    target = tiny(1, vocab_size=49152, hidden_size=16, num_hidden_layers=1)
    decoder = SpeculativeDecoder(target, PromptLookupDraft(), 3)
    response = respond(decoder, tokenizer, "one two three one two three", 12)
    plain = respond(TransformersStepper(target), tokenizer, "one two three one two three", 12)
    assert response.text == plain.text and response.breakdown.tokens_generated == 12
    assert response.breakdown.prefill_ms > 0 and response.breakdown.decode_ms > 0
    ids = prompt(9, 1)
    torch.testing.assert_close(decoder.score(ids), TransformersStepper(target).score(ids))


def test_stage_times_fill_the_decode_stage(pair):
    """Draft, verification and bookkeeping are all that a cycle does; nothing is counted twice."""
    timer = LatencyTimer("cpu")
    output = SpeculativeDecoder(*pair, 3).generate(prompt(9, 1), 30, timer=timer)
    assert set(output.stage_ms) == {"draft prefill", "draft", "verify", "bookkeeping"}
    assert all(ms > 0 for ms in output.stage_ms.values())
    decode = timer.get_elapsed_ms("decode")
    assert 0.8 * decode < sum(output.stage_ms.values()) <= decode


# -- what it refuses ----------------------------------------------------------------------------------------------


def decoder(**changes) -> SpeculativeDecoder:
    return SpeculativeDecoder(Markov(random_table(9, 1)), Markov(random_table(9, 2)), **changes)


@pytest.mark.parametrize(
    ("gamma", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)]
)
def test_gamma_below_one(gamma, error):
    """No draft tokens is plain decoding: a decoder that silently does that hides a mistake."""
    with pytest.raises(error, match="num_speculative="):
        decoder(num_speculative=gamma)


@pytest.mark.parametrize(
    ("ids", "new", "options", "error", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), 4, {}, ValueError, "one request at a time"),  # case 12
        (torch.zeros(1, 0, dtype=torch.int64), 4, {}, ValueError, "empty"),
        (torch.tensor([[9]]), 4, {}, ValueError, "holds 9"),
        (torch.tensor([[1.0]]), 4, {}, TypeError, "int64"),
        (torch.tensor([[1]]), 0, {}, ValueError, "max_new_tokens=0"),
        (torch.tensor([[1]]), 4, dict(temperature=-0.5), ValueError, "temperature=-0.5"),
        (torch.tensor([[1]]), 4, dict(temperature=1e-8), ValueError, "temperature=1e-08; expected 0"),
        (torch.tensor([[1]]), 4, dict(temperature=math.nan), ValueError, "temperature=nan"),
        (torch.tensor([[1]]), 4, dict(temperature=1.0, top_k=0), ValueError, "top_k=0"),
        (torch.tensor([[1]]), 4, dict(temperature=1.0, top_p=1.5), ValueError, "top_p=1.5"),
        (torch.tensor([[1]]), 4, dict(eos_token_id=9), ValueError, "eos_token_id=9"),
        (torch.tensor([[1]]), 4, dict(eos_token_id=[2]), TypeError, "one int"),
    ],
)
def test_requests_out_of_range_are_named(ids, new, options, error, message):
    """A batch above 1 among them: rows that accept different numbers would need caches of different lengths."""
    with pytest.raises(error, match=message):
        decoder().generate(ids, new, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_nan_logits_are_refused(whose, temperature):
    """An argmax over NaN is some token: it would look like an answer."""
    broken = decoder()
    reader = broken.target if whose == "target" else broken.draft.stepper
    reader.table = reader.table.clone()
    reader.table[:, 4] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        broken.generate(torch.tensor([[1]]), 4, temperature=temperature)


def test_nan_in_the_middle_of_a_verification_is_refused():
    """Behind a rejection as well: a model that overflows is broken, whether or not its row is used."""
    table = chain([1, 2, 3, 4, 0])
    table[3] = math.nan
    broken = SpeculativeDecoder(Markov(table), Markov(chain([1, 2, 3, 4, 0])), 4)
    with pytest.raises(ValueError, match="the target's logits hold NaN"):
        broken.generate(torch.tensor([[0]]), 8)


def test_vocabularies_that_differ():
    """Other sizes are refused but for a padded tail, on either side; there the text stays the target's."""
    with pytest.raises(ValueError, match="the draft's vocabulary has 400 ids and the target's 9"):
        SpeculativeDecoder(Markov(random_table(9, 1)), Markov(random_table(400, 2)))
    target = Markov(random_table(40, 1))
    plain = generate(target, PROMPT, 30).sequences
    for size in (30, 57):
        draft = Markov(random_table(size, 2))
        for temperature in (0.0, 1.0):
            output = SpeculativeDecoder(target, draft, 3).generate(
                PROMPT, 30, temperature=temperature, top_k=35 if temperature else None
            )
            assert int(output.sequences.max()) < 40
            if temperature == 0:
                assert torch.equal(output.sequences, plain)


def test_a_draft_with_a_smaller_vocabulary_keeps_the_distribution():
    """What the draft cannot name has q = 0 and comes from the residual; a longer tail is cut before sampling."""
    for size, seed in ((5, 3), (8, 4)):
        decoder = SpeculativeDecoder(Markov(random_table(6, 1)), Markov(random_table(size, seed)), 2)
        assert transitions_p_value(decoder, cycles=2_500, temperature=1.0) > 0.001


def test_devices_and_dtypes(pair):
    """On two devices: refused. In two dtypes: the text is the target's, as always."""
    target, small = pair
    elsewhere = Markov(random_table(97, 1))
    elsewhere.device = torch.device("meta")
    with pytest.raises(ValueError, match="the draft is on meta and the target on cpu"):
        SpeculativeDecoder(target, elsewhere)
    ids = prompt(8, 4)
    plain = generate(TransformersStepper(target), ids, 20).sequences
    half = FastDecoder.from_model(small, "bfloat16")
    for temperature in (0.0, 1.0):
        output = SpeculativeDecoder(target, half, 3).generate(ids, 20, temperature=temperature)
        assert temperature or torch.equal(output.sequences, plain)


def test_things_that_are_no_models(pair):
    """Named, with what is missing; and one cache cannot serve two roles."""
    with pytest.raises(TypeError, match="model is a StaticLike; expected a transformers model, a FastDecoder"):
        SpeculativeDecoder(StaticLike(), pair[1])
    with pytest.raises(TypeError, match="model is a str; expected a transformers model"):
        SpeculativeDecoder(pair[0], "smollm2-135m")
    reader = FastDecoder.from_model(pair[0])
    with pytest.raises(ValueError, match="one cache each"):
        SpeculativeDecoder(reader, reader)


class StaticLike:
    vocab_size = 97

    def prefill(self, input_ids):
        """Present, as in a stepper that cannot take tokens back."""

    def step(self, token_ids):
        """The same."""


@pytest.mark.parametrize("length", [-1, 9, 2.0, True])
def test_cropping_to_a_length_that_is_not_stored(pair, length):
    """transformers crops more than there is without a word."""
    stepper = TransformersStepper(pair[0])
    stepper.prefill(prompt(8, 1))
    with pytest.raises((ValueError, TypeError), match="crop"):
        stepper.crop_to(length)
    stepper.crop_to(8)
    assert stepper.length == 8


def test_one_request_at_a_time(pair):
    """Guards against two requests in turns through one pair of caches: wrong tokens, and no error."""
    target, draft = pair
    speculative = SpeculativeDecoder(target, draft, 3)
    first = speculative.start(prompt(7, 1), 12)
    speculative.generate(prompt(9, 2), 4)
    with pytest.raises(RuntimeError, match="one at a time"):
        speculative.cycle(first)
    again = speculative.start(prompt(7, 1), 12)
    speculative.step(prompt(1, 2))
    with pytest.raises(RuntimeError, match="one at a time"):
        speculative.cycle(again)


def test_what_was_generated_can_be_trained_on(pair):
    """Guards against an inference tensor handed out, which no backward pass takes."""
    sequences = SpeculativeDecoder(*pair, 3).generate(prompt(7, 1), 10).sequences
    model = tiny(5)
    model(sequences, labels=sequences).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("ids", [torch.arange(110), torch.tensor([3, 5, 96, 105, 109])])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_behind_the_targets_vocabulary_are_never_drafted(ids, temperature):
    """Guards against a draft's padded tail, or head rows of it, that ends a request half way."""
    target = tiny(11)
    big = FastDecoder.from_model(tiny(5, vocab_size=110), head_ids=ids)
    chance = torch.Generator().manual_seed(2)
    output = SpeculativeDecoder(target, big, 3).generate(prompt(7, 1), 20, temperature=temperature, generator=chance)
    assert int(output.sequences.max()) < 97 and output.sequences.shape[1] == 27
    if temperature == 0:
        assert torch.equal(output.sequences, generate(TransformersStepper(target), prompt(7, 1), 20).sequences)


def test_a_target_without_hidden_states_is_refused_at_once():
    """Guards against a request that dies after its prompt was read."""

    class Reading(PromptLookupDraft):
        needs_features = True

    draft = Reading()
    with pytest.raises(TypeError, match="Markov has no `features`"):
        SpeculativeDecoder(Markov(random_table(8, 1)), draft)
