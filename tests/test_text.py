"""The text path: streaming, cached ids, prompt compression."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from every_millisecond.compress import Section, compress_prompt
from llm_latency.text import StreamingDetokenizer, TokenCache

TEXTS = ["Hello, wörld 👩‍👩‍👧 你好 a  b\n\n c", "\ufffd is a character too", " leading", "", "\n", "don't . stop ,"]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama-2-like: blanks as a low line, bytes as tokens, BOS added, the first blank stripped at decoding."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "▁▁", "▁Hello", "Hello", "▁world", "!", "a", "▁a", "\n"):
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level(add_bos: bool = False) -> PreTrainedTokenizerFast:
    """GPT-like: every byte is a token, a few merges, two chat markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("ll", "o"), ("Ġ", "w"), ("w", "o"), ("r", "l"), ("Ċ", "Ċ")]
    vocab = {piece: i for i, piece in enumerate(alphabet + ["".join(m) for m in merges])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "<|user|>", "<|end|>")])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")


def streamed(tokenizer, ids, **options) -> str:
    stream = StreamingDetokenizer(tokenizer, **options)
    return "".join(stream.push(i) for i in ids) + stream.finish()


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level])
@pytest.mark.parametrize("skip", [False, True])
def test_stream_equals_full_decode_for_random_ids(make, skip):
    """Fault: blanks lost or doubled at piece borders (case 28), bytes of two characters mixed up, runs of rubbish."""
    tokenizer, rng = make(), random.Random(0)
    frequent = [i for i in range(len(tokenizer)) if i < 3 or i > 255]
    for _ in range(150):
        ids = [rng.choice(frequent) if rng.random() < 0.7 else rng.randrange(len(tokenizer)) for _ in range(70)]
        assert streamed(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_words_keep_their_spaces():
    """Fault (case 28): the stream strips the blank of every word, or only of none."""
    tokenizer = sentencepiece_like()
    vocab = tokenizer.get_vocab()
    ids = [vocab[piece] for piece in ("▁Hello", "▁world", "!", "▁Hello")]
    stream = StreamingDetokenizer(tokenizer)
    assert [stream.push(i) for i in ids] == ["Hello", " world", "!", " Hello"]


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level])
def test_never_half_a_character(make):
    """Fault: a replacement character shown and corrected later; a complete character held back for ever."""
    tokenizer = make()
    text = "a👩🏽é你!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = StreamingDetokenizer(tokenizer)
    pieces = [stream.push(i) for i in ids] + [stream.finish()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.text == text


def test_byte_level_character_comes_with_its_last_byte():
    """Fault: a whole character is held until the next token although nothing can change it any more."""
    tokenizer = byte_level()
    ids = tokenizer.encode("你", add_special_tokens=False)
    stream = StreamingDetokenizer(tokenizer)
    assert [stream.push(i) for i in ids] == ["", "", "你"]


def test_half_a_character_at_the_end_comes_as_the_full_decode_has_it():
    """Fault: the tail of a stream that ends within a character is dropped silently."""
    tokenizer = byte_level()
    ids = tokenizer.encode("ok👩", add_special_tokens=False)[:-1]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == "ok\ufffd"


def test_long_stream_decodes_short_windows_only():
    """Fault: the whole answer is decoded again at every token: cost grows with the square of the length."""
    tokenizer = byte_level()
    stream = StreamingDetokenizer(tokenizer)
    lengths = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **options: (lengths.append(len(ids)), decode(ids, **options))[1]
    for token_id in tokenizer.encode("hello world " * 100, add_special_tokens=False):
        stream.push(token_id)
    assert max(lengths) <= 40


def test_stream_refuses_bad_ids_and_use_after_the_end():
    """Fault: a negative id, a float or a bool is decoded to rubbish; an answer goes on in the last one's state."""
    tokenizer = byte_level()
    stream = StreamingDetokenizer(tokenizer)
    for bad, error in (
        (-1, ValueError),
        (len(tokenizer), ValueError),
        (1.0, TypeError),
        (True, TypeError),
        ("a", TypeError),
    ):
        with pytest.raises(error, match="token id"):
            stream.push(bad)
    with pytest.raises(TypeError):
        stream.push(torch.tensor([1, 2]))
    assert stream.push(torch.tensor(40)) == tokenizer.decode([40])
    stream.finish()
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="finished"):
        stream.push(1)
    with pytest.raises(TypeError, match="decode"):
        StreamingDetokenizer("not a tokenizer")


def test_token_zero_is_text():
    """Fault (case 14): id 0 is taken for 'nothing' or for the end."""
    tokenizer = byte_level()
    assert streamed(tokenizer, [0, 0, 1]) == tokenizer.decode([0, 0, 1]) != ""


def test_rewriting_tokenizer_is_told():
    """Fault: a decode that rewrites earlier text (clean-up of blanks) makes a stream that silently differs."""

    class Cleaning:
        def decode(self, ids):
            return "".join("ab ."[i] for i in ids).replace(" .", ".")

    stream = StreamingDetokenizer(Cleaning())
    for token_id in (0, 2, 3):
        stream.push(token_id)
    with pytest.raises(RuntimeError, match="clean_up"):
        stream.finish()


@pytest.mark.model
def test_stream_of_the_real_tokenizer(tokenizer):
    """Fault: right for a toy vocabulary, wrong for the course's own."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


# --- token cache ---


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level, lambda: byte_level(add_bos=True)])
def test_cached_ids_are_the_tokenizers(make):
    """Fault: ids of a prefix and of the rest are joined where tokenisation does not concatenate."""
    tokenizer, rng = make(), random.Random(1)
    cache = TokenCache(tokenizer)
    parts = ["hel", "lo", " wor", "rl", "<|end|>", "</s>", "\n", " ", "<|user|>", "a", "é"]
    for _ in range(30):
        cache.remember("".join(rng.choice(parts) for _ in range(6)))
    for _ in range(400):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(12)))
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special)
            assert cache.encode(text, add_special_tokens=special) == expected
            assert cache.encode(text, add_special_tokens=special) == expected
    assert cache.stats.prefix_hits > 0 and cache.stats.hits > 0


def test_prefix_is_reused_only_behind_a_marker():
    """Fault: a prefix that ends within a word counts as reusable."""
    cache = TokenCache(byte_level())
    assert cache.remember("hello wor") == 0
    assert cache.remember("<|user|>hello<|end|>wor") == len(
        cache.encode("<|user|>hello<|end|>", add_special_tokens=False)
    )
    assert cache.encode("hello world") == byte_level().encode("hello world")


def test_exactly_one_beginning_of_text():
    """Fault (case 29): a chat template's text tokenised again begins with the marker twice."""
    tokenizer = byte_level(add_bos=True)
    tokenizer.chat_template = "<s>{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    messages = [{"role": "user", "content": "hello"}]
    cache = TokenCache(tokenizer)
    direct = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.encode(text).count(tokenizer.bos_token_id) == 2, "the trap that this test is about is gone"
    assert cache.encode_chat(messages) == cache.encode(text) == direct
    assert direct.count(tokenizer.bos_token_id) == 1
    assert cache.encode("hello")[0] == tokenizer.bos_token_id


def test_cache_is_bounded_and_its_lists_are_copies():
    """Fault: the cache grows without end; a caller who appends to the ids changes them for everybody."""
    cache = TokenCache(byte_level(), max_entries=2)
    cache.encode("a").append(99)
    assert cache.encode("a") == byte_level().encode("a")
    for text in ("b", "c"):
        cache.encode(text)
    misses = cache.stats.misses
    cache.encode("c")
    assert cache.stats.misses == misses
    cache.encode("a")
    assert cache.stats.misses == misses + 1
    with pytest.raises(ValueError, match="max_entries"):
        TokenCache(byte_level(), max_entries=0)
    with pytest.raises(TypeError, match="string"):
        cache.encode(["a"])


def _add_token(cache: TokenCache) -> None:
    cache.tokenizer.add_tokens(["hello"])


def _split_apart(cache: TokenCache) -> None:
    core = cache.tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("o", "isolated"), core.pre_tokenizer])


def _replace(cache: TokenCache) -> None:
    cache.tokenizer = sentencepiece_like()


@pytest.mark.parametrize("change", [_add_token, _split_apart, _replace])
def test_a_changed_tokenizer_is_not_answered_from_memory(change):
    """Fault (case 50): a cache keyed by the text alone hands out ids of the tokenizer as it was."""
    cache = TokenCache(byte_level())
    text = "<|user|>hello<|end|>hello"
    cache.remember("<|user|>hello<|end|>")
    before = cache.encode(text)
    change(cache)
    assert cache.encode(text) == cache.tokenizer.encode(text) != before
    hits = cache.stats.hits
    assert cache.encode(text) != before and cache.stats.hits == hits + 1  # and then remembers again


@pytest.mark.model
def test_real_chat_prompts_reuse_the_system_part(tokenizer):
    """Fault: right ids, but the shared system prompt is tokenised again for every question."""
    cache = TokenCache(tokenizer)
    system = {"role": "system", "content": "You explain solutions of exercises in plain words."}
    cache.remember(tokenizer.apply_chat_template([system], tokenize=False))
    for question in ("Why is 7 prime?", " blank first", "你好\n\n"):
        messages = [system, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert cache.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)
    assert cache.stats.prefix_hits == 3


# --- compression ---

STATEMENT = "Find the sum of two numbers. Please note that the numbers are positive. Find the sum of two numbers."
SECTIONS = [
    Section("task", "Explain the solution.", required=True),
    Section("statement", STATEMENT, importance=2),
    Section(
        "history", "It came up in 1999. It was used in a contest, e.g. a school one. Many solved it.", importance=0
    ),
    Section("code", "def f(a, b):\n    return  a + b", importance=3, verbatim=True),
]


def test_compression_obeys_the_budget_and_tells_what_went():
    """Fault: text cut in the middle, budget missed by a token, something dropped without a word."""
    tokenizer = byte_level()
    full = "\n\n".join(s.text for s in SECTIONS)
    size = len(tokenizer.encode(full))
    for budget in range(len(tokenizer.encode("Explain the solution.")), size + 2, 5):
        result = compress_prompt(SECTIONS, tokenizer, budget=budget)
        assert result.tokens == len(tokenizer.encode(result.text)) <= budget
        assert result.text.startswith("Explain the solution.")
        assert bool(result.dropped) == (budget < size)
        for piece in result.dropped:
            assert piece.text and piece.section in result.report()
    assert compress_prompt(SECTIONS, tokenizer, budget=size).text == full


def test_compression_takes_the_harmless_first():
    """Fault: a section is dropped although repeated sentences would have been enough; code is reformatted."""
    tokenizer = byte_level()
    size = len(tokenizer.encode("\n\n".join(s.text for s in SECTIONS)))
    result = compress_prompt(SECTIONS, tokenizer, budget=size - 20)
    assert [piece.rule for piece in result.dropped] == ["repeats"]
    assert result.text.count("Find the sum") == 1
    smaller = compress_prompt(SECTIONS, tokenizer, budget=size - 70)
    assert smaller.dropped[-1].rule == "sentence" and smaller.dropped[-1].section == "history"
    assert SECTIONS[3].text in smaller.text
    assert "e.g. a school one." in smaller.text or "e.g." not in smaller.text


def test_what_is_required_keeps_its_sentences():
    """Kind 50: a required sentence was taken as a repeat of one further up, whose section was then dropped."""
    tokenizer = byte_level()
    sections = [
        Section("background", "Answer in English. It is an old exercise. Many have solved it.", importance=0),
        Section("rules", "Answer in English. Be brief.", required=True),
    ]
    result = compress_prompt(sections, tokenizer, budget=len(tokenizer.encode("Answer in English. Be brief.")))
    assert result.text == "Answer in English. Be brief."


def test_impossible_budgets_are_errors():
    """Fault: a required section is truncated silently."""
    with pytest.raises(ValueError, match="budget of 3"):
        compress_prompt(SECTIONS, byte_level(), budget=3)
    with pytest.raises(ValueError, match="at least 1"):
        compress_prompt(SECTIONS, byte_level(), budget=0)
    with pytest.raises(ValueError, match="different names"):
        compress_prompt([SECTIONS[0], SECTIONS[0]], byte_level(), budget=99)
