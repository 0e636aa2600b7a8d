"""InferenceBenchmark and module_breakdown: what is timed, that it adds up, that no hook is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from every_millisecond.notebook.module_breakdown import PARTS, find_parts, module_breakdown, part_hooks
from llm_latency.benchmark import BenchmarkResult, InferenceBenchmark
from llm_latency.generation import Stepper, TransformersStepper
from llm_latency.timing import LatencyBreakdown, LatencyTimer


class LetterTokenizer:
    """One id per letter; enough of a tokenizer for `respond`."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 + 3 for letter in text]}

    def decode(self, ids: list[int], **options) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class CountingStepper(Stepper):
    """A stepper that always says token 5, and remembers what it was asked."""

    device = torch.device("cpu")
    vocab_size = 97
    max_positions = 512

    def __init__(self) -> None:
        self.asked: list[int] = []

    def _logits(self, *shape: int) -> torch.Tensor:
        logits = torch.zeros(*shape, self.vocab_size)
        logits[..., 5] = 1
        return logits

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return self._logits(1)

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._logits(1, token_ids.shape[1])

    def crop_to(self, length: int) -> None:
        """Nothing is stored."""


def breakdown(**changes) -> LatencyBreakdown:
    good = dict(
        tokenize_ms=1, prefill_ms=9, decode_ms=40, detokenize_ms=2, total_ms=54, prompt_tokens=7, tokens_generated=5
    )
    return LatencyBreakdown(**{**good, **changes})


def test_prompts_take_turns_and_warmup_is_thrown_away():
    """Guards against warm-up runs in the statistics, and one prompt measured wholly before the next."""
    stepper = CountingStepper()
    results = InferenceBenchmark(stepper, LetterTokenizer()).run(
        ["abc", "abcdefg"], max_new_tokens=4, warmup=2, repeats=3
    )
    assert stepper.asked == [3, 7] * 5
    assert isinstance(results, list)
    assert [(r.prompt, r.prompt_tokens, r.tokens_generated, len(r.breakdowns)) for r in results] == [
        ("abc", 3, 4, 3),
        ("abcdefg", 7, 4, 3),
    ]


def test_tokens_are_counted_as_ids_and_end_of_text_ends_the_answer():
    """Guards against counting text tokenised again, prompt tokens as generated, or tokens after the end (case 23)."""
    benchmark = InferenceBenchmark(CountingStepper(), LetterTokenizer(), eos_token_id=5)
    (result,) = benchmark.run(["abc"], max_new_tokens=9, warmup=0, repeats=1)
    assert (result.prompt_tokens, result.tokens_generated) == (3, 1)
    assert result.time_per_output_token_ms is None
    assert "undefined" in result.report()


def test_a_transformers_model_is_taken_as_it_is(tiny_llama):
    """Guards against stages that do not add up to the wall clock on a real model."""
    (result,) = InferenceBenchmark(tiny_llama, LetterTokenizer()).run(["hello"], max_new_tokens=6, warmup=1, repeats=3)
    for run in result.breakdowns:
        assert sum(run.stages_ms.values()) + run.unaccounted_ms == pytest.approx(run.total_ms)
        assert min(run.stages_ms.values()) > 0
    assert result.tokens_generated == 6


def test_result_gives_medians_under_the_names_of_the_breakdown():
    """Guards against figures of a single run passed off as medians, and against a TPOT of n instead of n - 1 tokens."""
    runs = tuple(breakdown(decode_ms=ms, total_ms=ms + 14) for ms in (40, 44, 100))
    result = BenchmarkResult("hello", runs)
    assert result.decode_ms == 44
    assert result.time_per_output_token_ms == 11
    assert result.time_to_first_token_ms == 10
    assert result.total_ms == 58
    assert result.unaccounted_ms == pytest.approx(2)
    assert result.tokens_per_second == pytest.approx(5 / 0.058)
    spread = result.spread("decode_ms")
    assert (spread.median, spread.p10, spread.p90) == pytest.approx((44, 40.8, 88.8))
    with pytest.raises(KeyError, match="'latency' is no figure"):
        result.spread("latency")
    assert "44.00 ms" in result.report()
    assert "7 tokens in, 5 out, 3 repeats" in result.report()


def test_repeats_of_different_length_are_not_pooled():
    """Guards against a median over answers of different lengths, which sampling would give."""
    with pytest.raises(ValueError, match=r"differ.*\(7, 4\), \(7, 5\)"):
        BenchmarkResult("hello", (breakdown(), breakdown(tokens_generated=4)))
    with pytest.raises(ValueError, match="empty"):
        BenchmarkResult("hello", ())


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("abc", {}, TypeError, "prompts is a str"),
        (None, {}, TypeError, "prompts is a NoneType"),
        ([], {}, ValueError, "prompts is empty"),
        ([""], {}, ValueError, "empty"),
        ([3], {}, TypeError, "3"),
        (["abc"], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        (["abc"], {"max_new_tokens": -2}, ValueError, "max_new_tokens"),
        (["abc"], {"max_new_tokens": 1000}, ValueError, "512"),
        (["abc"], {"repeats": 0}, ValueError, "repeats"),
        (["abc"], {"warmup": -1}, ValueError, "warmup"),
        (["abc"], {"repeats": 1.5}, TypeError, "repeats"),
    ],
)
def test_wrong_requests_are_named(prompts, options, error, message):
    """Guards against a string taken for a list of letters, and against benchmarks of nothing."""
    benchmark = InferenceBenchmark(CountingStepper(), LetterTokenizer())
    with pytest.raises(error, match=message):
        benchmark.run(prompts, **{"max_new_tokens": 4, "warmup": 0, "repeats": 1, **options})


def test_what_is_no_model_is_refused():
    """Guards against an error deep inside the loop, far from its cause."""
    with pytest.raises(TypeError, match="model is a Linear"):
        InferenceBenchmark(nn.Linear(2, 2), LetterTokenizer())


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("which", ["tiny_llama", "tiny_qwen2"])
def test_parts_add_up_and_no_hook_is_left(which, phase, request):
    """Guards against time lost between modules, and against a model that stays slow after it was looked at."""
    model = request.getfixturevalue(which)
    found = module_breakdown(model, torch.arange(1, 12)[None], phase=phase, steps=3, repeats=3)
    assert tuple(found.parts_ms) == PARTS
    assert sum(found.parts_ms.values()) == pytest.approx(found.total_ms, rel=1e-9)
    assert sum(found.share(part) for part in PARTS) == pytest.approx(1)
    assert min(found.parts_ms.values()) > 0
    # per layer 2 norms, attention, FFN; rotary embedding, embedding, final norm, head
    assert found.stages_per_pass == 3 * 4 + 4
    assert found.hooks_cost_ms == found.total_ms - found.unhooked_ms
    assert hook_count(model) == 0
    for part in PARTS:
        assert part in found.report()


def test_hooks_change_nothing_but_time(tiny_llama):
    """Guards against hooks that alter what the model computes."""
    ids = torch.arange(1, 12)[None]
    plain = TransformersStepper(tiny_llama).prefill(ids)
    timer = LatencyTimer("cpu")
    with part_hooks(find_parts(tiny_llama), timer):
        hooked = TransformersStepper(tiny_llama).prefill(ids)
    assert torch.equal(plain, hooked)
    assert timer.get_count("attention") == 4  # three layers and the rotary embedding


def test_a_norm_inside_attention_is_not_counted_twice():
    """Guards against double counting in models that normalise queries and keys within attention (Qwen3)."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64,
    )  # fmt: skip
    found = module_breakdown(Qwen3ForCausalLM(config).eval(), torch.arange(1, 9)[None], repeats=1)
    assert sum(found.parts_ms.values()) == pytest.approx(found.total_ms, rel=1e-9)
    assert found.stages_per_pass == 2 * (4 + 2) + 4


def test_hooks_go_even_when_the_forward_pass_fails(tiny_llama):
    """Guards against hooks that outlive an error and slow, or break, every later call."""

    def fail(*_):
        raise ZeroDivisionError

    handle = tiny_llama.model.layers[1].mlp.down_proj.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        module_breakdown(tiny_llama, torch.arange(1, 12)[None])
    handle.remove()
    assert hook_count(tiny_llama) == 0
    assert module_breakdown(tiny_llama, torch.arange(1, 12)[None], repeats=1).total_ms > 0


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        (torch.ones(1, 4, dtype=torch.long), {"phase": "both"}, ValueError, "phase is 'both'"),
        (torch.ones(1, 4, dtype=torch.long), {"repeats": 0}, ValueError, "repeats"),
        (torch.ones(1, 4, dtype=torch.long), {"steps": 0}, ValueError, "steps"),
        (torch.ones(1, 4, dtype=torch.long), {"warmup": -1}, ValueError, "warmup"),
        (torch.ones(1, 0, dtype=torch.long), {}, ValueError, "empty"),
        (torch.ones(2, 4, dtype=torch.long), {}, ValueError, r"\[2, 4\]"),
        (torch.ones(1, 510, dtype=torch.long), {"phase": "decode", "steps": 8}, ValueError, "512"),
        (torch.ones(1, 4), {}, TypeError, "float32"),
        ([[1, 2]], {}, TypeError, "list"),
    ],
)
def test_wrong_passes_are_named(tiny_llama, ids, options, error, message):
    """Guards against a breakdown of a pass that the model cannot make."""
    with pytest.raises(error, match=message):
        module_breakdown(tiny_llama, ids, **options)


def test_a_model_of_another_family_is_refused():
    """Guards against a breakdown in which everything is overhead because no module was recognised."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no attention"):
        module_breakdown(model, torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(TypeError, match="model is a Linear"):
        module_breakdown(nn.Linear(2, 2), torch.ones(1, 4, dtype=torch.long))


@pytest.mark.model
def test_the_real_model_adds_up(target):
    """Guards against modules of the course's own model that no hook recognises: 30 layers of 4, and 4 more."""
    found = module_breakdown(target, torch.arange(100, 120)[None], repeats=1)
    assert found.stages_per_pass == 124
    assert sum(found.parts_ms.values()) == pytest.approx(found.total_ms, rel=1e-9)
    assert found.share("ffn") > found.share("embedding")
