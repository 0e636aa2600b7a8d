"""The plain loop over transformers models."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import StaticCache

from every_millisecond.request import standard_prompt
from llm_latency.benchmark import respond
from llm_latency.compat import with_cache
from llm_latency.generation import (
    CompiledStepper,
    RecomputeStepper,
    StaticStepper,
    Stepper,
    TransformersStepper,
    generate,
)
from llm_latency.text.prompt import chat_text, encode_prompt
from llm_latency.timing import LatencyTimer


def prompt_ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_qwen2"])
def test_greedy_equals_transformers_generate(fixture, request):
    """The loop must choose what `generate` chooses, with and without a cache, at odd lengths."""
    model = request.getfixturevalue(fixture)
    ids = prompt_ids(13)
    theirs = model.generate(ids, max_new_tokens=21, do_sample=False, eos_token_id=None, pad_token_id=0)
    for stepper in (
        TransformersStepper(model),
        TransformersStepper(model, lambda: StaticCache(config=model.config, max_cache_len=64)),
        RecomputeStepper(model),
    ):
        ours = generate(stepper, ids, 21)
        assert ours.tokens_generated == 21
        assert torch.equal(ours.sequences, theirs)


def test_step_takes_several_tokens_and_score_equals_one_pass(tiny_llama):
    """Verification reads k tokens at once: each position's logits must be those of one plain pass."""
    ids = prompt_ids(150)
    expected = tiny_llama(ids).logits
    for stepper in (TransformersStepper(tiny_llama), RecomputeStepper(tiny_llama)):
        torch.testing.assert_close(stepper.score(ids), expected, rtol=1e-4, atol=1e-4)
        last = stepper.prefill(ids[:, :140])
        torch.testing.assert_close(last, expected[:, 139], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stepper.step(ids[:, 140:145]), expected[:, 140:145], rtol=1e-4, atol=1e-4)


def test_stops_at_end_of_text_and_at_max_new_tokens(tiny_llama):
    """Exactly max_new_tokens, or up to and with the end-of-text token; token 0 ends nothing."""
    stepper, ids = TransformersStepper(tiny_llama), prompt_ids(9)
    new = generate(stepper, ids, 12).sequences[0, 9:].tolist()
    for stop in (new[0], new[4]):
        stopped = generate(stepper, ids, 12, eos_token_id=stop)
        expected = new[: new.index(stop) + 1]
        assert stopped.sequences[0, 9:].tolist() == expected and stopped.tokens_generated == len(expected)
    assert generate(stepper, ids, 1).sequences.shape == (1, 10)


@pytest.mark.parametrize("kind", [TransformersStepper, RecomputeStepper, StaticStepper])
def test_tokens_taken_back_leave_no_trace(tiny_llama, kind):
    """Every stepper may be a speculative target: what was refused must not be seen by what follows."""
    ids, stepper = prompt_ids(30), kind(tiny_llama)
    expected = tiny_llama(ids).logits
    stepper.prefill(ids[:, :20])
    assert stepper.length == 20
    stepper.step(ids[:, :7])
    stepper.crop_to(20)
    torch.testing.assert_close(stepper.step(ids[:, 20:23]), expected[:, 20:23], rtol=1e-4, atol=1e-4)
    assert stepper.length == 23
    for bad, error in ((24, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"crop_to={bad}"):
            stepper.crop_to(bad)
    stepper.crop_to(0)
    with pytest.raises(RuntimeError, match="before prefill"):
        stepper.step(ids[:, :1])


def test_hidden_states_are_kept_where_they_can_be(tiny_llama):
    """A compiled step gives none: the last ones of the prefill would be taken for its own."""
    stepper = StaticStepper(tiny_llama)
    stepper.prefill(prompt_ids(5))
    assert stepper.features is None
    stepper.keep_features()
    stepper.prefill(prompt_ids(5))
    assert stepper.features.shape == (5, tiny_llama.config.hidden_size)
    for other in (RecomputeStepper(tiny_llama), CompiledStepper(tiny_llama, 16)):
        with pytest.raises(TypeError, match="has no `features`"):
            other.keep_features()


class ZeroStepper(Stepper):
    """Always prefers token 0."""

    device, vocab_size, max_positions = torch.device("cpu"), 7, 100

    def prefill(self, input_ids):
        return torch.tensor([[9.0, 0, 0, 0, 0, 0, 0]])

    def step(self, token_ids):
        return torch.tensor([[[9.0, 0, 0, 0, 0, 0, 0]]])

    def crop_to(self, length):
        """Nothing is stored."""


def test_token_zero_is_a_token_like_any_other():
    """Id 0 is false in Python; `if not token: break` ended texts early in one of the articles."""
    assert generate(ZeroStepper(), torch.tensor([[0, 0]]), 5).sequences.tolist() == [[0] * 7]


def test_nan_logits_are_an_error():
    """argmax over NaN gives a plausible id; the text would go on as if nothing had happened."""

    class NanStepper(ZeroStepper):
        def step(self, token_ids):
            return torch.full((1, 1, 7), torch.nan)

    with pytest.raises(ValueError, match="NaN"):
        generate(NanStepper(), torch.tensor([[1]]), 3)


@pytest.mark.parametrize(
    ("ids", "new", "error", "message"),
    [
        ([[1, 2]], 0, ValueError, "max_new_tokens=0"),
        ([[1, 2]], -3, ValueError, "max_new_tokens=-3"),
        ([[1, 2]], 2.5, TypeError, "max_new_tokens=2.5"),
        ([[1, 2]], True, TypeError, "max_new_tokens=True"),
        ([[1, 97]], 2, ValueError, "holds 97; expected ids from 0 to 96"),
        ([[-1]], 2, ValueError, "holds -1"),
        ([[1] * 511], 2, ValueError, "511 prompt tokens and 2 new ones need 513 positions; this model has 512"),
        ([[1], [2]], 2, ValueError, r"shape \[2, 1\]"),
        ([[1.0]], 2, TypeError, "float32"),
    ],
)
def test_bad_requests_are_named(tiny_llama, ids, new, error, message):
    """Each refusal says which value was wrong and what was expected."""
    with pytest.raises(error, match=message):
        generate(TransformersStepper(tiny_llama), torch.tensor(ids), new)


def test_empty_prompt_and_wrong_type(tiny_llama):
    """An empty prompt has no last position whose logits could be read."""
    stepper = TransformersStepper(tiny_llama)
    with pytest.raises(ValueError, match="empty"):
        generate(stepper, torch.zeros(1, 0, dtype=torch.int64), 2)
    with pytest.raises(TypeError, match="list"):
        generate(stepper, [[1, 2]], 2)
    with pytest.raises(RuntimeError, match="before prefill"):
        stepper.step(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="temperature=-1"):
        generate(stepper, prompt_ids(3), 2, temperature=-1)
    with pytest.raises(TypeError, match=r"eos_token_id=\[2, 3\]"):
        generate(stepper, prompt_ids(3), 2, eos_token_id=[2, 3])


def test_sampling_is_repeatable_and_independent_of_the_global_seed(tiny_llama):
    """The generator alone decides."""
    stepper, ids = TransformersStepper(tiny_llama), prompt_ids(5)
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed * 100 + len(draws))
        generator = torch.Generator().manual_seed(seed)
        draws.append(generate(stepper, ids, 20, temperature=1.3, top_k=50, generator=generator).sequences)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_prefill_and_decode_are_really_apart():
    """The articles could not separate them: here each slow part must land in its own stage."""

    class Slow(ZeroStepper):
        def prefill(self, input_ids):
            time.sleep(0.06)
            return super().prefill(input_ids)

        def step(self, token_ids):
            time.sleep(0.02)
            return super().step(token_ids)

    timer = LatencyTimer(device="cpu")
    generate(Slow(), torch.tensor([[1, 2, 3]]), 4, timer=timer)
    assert timer.get_elapsed_ms("prefill") >= 60
    assert timer.get_elapsed_ms("decode") >= 60  # three steps: the last token is never read
    assert timer.get_elapsed_ms("decode") < 60 + 60


@pytest.mark.model
def test_a_prompt_of_each_length_is_exact_and_has_one_template(tokenizer):
    """A chat text tokenised again must not gain a second beginning-of-text token (cases.md 29)."""
    for n in (139, 256, 257, 1001):
        text = standard_prompt(tokenizer, n)
        ids = encode_prompt(tokenizer, text)
        assert len(ids) == n
        assert text.count("<|im_start|>system") == 1
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="tokens=3"):
        standard_prompt(tokenizer, 3)
    with pytest.raises(ValueError, match="empty"):
        encode_prompt(tokenizer, "")
    with pytest.raises(TypeError, match="bytes"):
        encode_prompt(tokenizer, b"x")


@pytest.mark.model
def test_respond_accounts_for_the_whole_answer(target, tokenizer):
    """Four stages, counts as ids, text equal to the full decode, and nothing of weight outside the stages."""
    prompt = chat_text(tokenizer, "Name three colours.")
    response = respond(TransformersStepper(target), tokenizer, prompt, 8)
    b = response.breakdown
    assert b.tokens_generated == 8 and b.prompt_tokens == len(encode_prompt(tokenizer, prompt))
    assert response.text == tokenizer.decode(response.sequences[0, b.prompt_tokens :])
    assert b.unaccounted_ms < 0.02 * b.total_ms


@pytest.mark.model
def test_left_padded_rows_answer_as_alone_and_right_padding_is_refused(target, tokenizer):
    """Prompts of 3 and 7 tokens in one batch: each row as in its solo run (cases.md 30)."""
    rows = [[504, 2365, 282], [504, 2365, 282, 260, 1001, 314, 338]]
    longest = max(map(len, rows))
    solo = [generate(TransformersStepper(target), torch.tensor([row]), 6).sequences[0, len(row) :] for row in rows]
    ids = torch.tensor([[2] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    both = target.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    for row, alone in zip(both[:, longest:], solo, strict=True):
        assert torch.equal(row, alone)
    with pytest.raises(ValueError, match="one request at a time"):
        generate(TransformersStepper(target), ids, 6)


def test_with_cache_names_the_argument_that_this_transformers_knows(tiny_llama):
    """A wrong name is swallowed by **kwargs: the cache would stay empty without a word."""
    from transformers import DynamicCache

    cache = DynamicCache(config=tiny_llama.config)
    tiny_llama(prompt_ids(7), use_cache=True, **with_cache(cache))
    assert cache.get_seq_length() == 7
