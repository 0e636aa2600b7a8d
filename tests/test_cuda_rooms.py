"""Every room of the library gives on the GPU what it gives on the CPU: the same ids, the same numbers to a rounding.

On a CPU-only machine the GPU is a pretended one, so what is tested is the discipline: tensors of one device in one
operator, generators of the right one, no numpy on the device's memory, events waited for. On a real GPU it is the same.
"""

from __future__ import annotations

import pytest
import torch
from cuda_toys import like, prompt, tiny
from torch import nn

from llm_latency.attention import FlashAttention, attend, attention_reference
from llm_latency.batching import BatchingEngine, EngineOptions, Sampling, SchedulerOptions
from llm_latency.benchmark import InferenceBenchmark
from llm_latency.engine import FastDecoder
from llm_latency.generation import CompiledStepper, RecomputeStepper, StaticStepper, TransformersStepper, generate
from llm_latency.kv_cache import Int8KVCache
from llm_latency.quality import drift, perplexity, regression_test
from llm_latency.quantization import Int8Linear, quantize_
from llm_latency.sampling import probabilities, sample
from llm_latency.speculative import ModelDraft, PromptLookupDraft, SpeculativeDecoder, verify
from llm_latency.timing import LatencyTimer, compare, measure

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 rounds FP32 products to ten bits; greedy texts would then differ between the devices."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_both(run, tolerance: float = 1e-4):
    """`run("cuda")`, after a check that its tensors, lists and numbers are those of `run("cpu")`."""
    expected, found = run("cpu"), run("cuda")

    def compare_parts(a, b) -> None:
        if isinstance(a, torch.Tensor):
            assert b.is_cuda and a.shape == b.shape and a.dtype == b.dtype
            if a.is_floating_point():
                assert torch.allclose(b.cpu(), a, atol=tolerance, rtol=tolerance, equal_nan=True)
            else:
                assert torch.equal(b.cpu(), a)
        elif isinstance(a, (list, tuple)):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                compare_parts(x, y)
        else:
            assert b == pytest.approx(a, rel=tolerance)

    compare_parts(expected, found)
    return found


def random(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "flash", "sdpa", "auto"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(backend, causal, masked):
    """Guards against masks, positions and fill values that are made on the host."""

    def run(device):
        q, k, v = random(device, 2, 5, 6, 16), random(device, 2, 9, 2, 16, seed=1), random(device, 2, 9, 2, 16, seed=2)
        mask = random(device, 2, 1, 5, 9, seed=3) > -0.5 if masked else None
        return attend(q, k, v, backend=backend, causal=causal, mask=mask)

    on_both(run)


@pytest.mark.parametrize("block", [4, 128])
def test_blocked_and_reference_attention(block):
    """Guards against running sums of the blocked loop that start on another device."""

    def run(device):
        q, k = random(device, 1, 7, 4, 8), random(device, 1, 7, 4, 8, seed=1)
        return FlashAttention(block, block)(q, k, k, causal=True), attention_reference(q, k, k, causal=True)

    on_both(run)


def test_a_mask_left_on_the_host_is_named():
    """Guards against a bare kernel error where two tensors lie apart."""
    q = random("cuda", 1, 4, 2, 8)
    with pytest.raises(ValueError, match="mask is on cpu, the queries on cuda:0"):
        attend(q, q, q, mask=torch.ones(4, 4, dtype=torch.bool))


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "int8_kv"])
def test_int8_cache_behind_a_model(implementation):
    """Guards against scales, open groups and windows that are made, cropped or reordered on the host.

    Where the attention reads the codes itself, on CUDA it is a Triton kernel.
    """

    def run(device):
        model = tiny(11).to(device)
        model.set_attn_implementation(implementation)
        cache = Int8KVCache(model.config, residual_length=4, group_size=16)
        ids = prompt(37, 1).to(device)
        with torch.no_grad():
            read = [model(ids, past_key_values=cache).logits]
            cache.crop(-7)
            read += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(3)]
            cache.batch_repeat_interleave(2)
            read.append(model(ids[:, :2].expand(2, -1), past_key_values=cache).logits)
            cache.reorder_cache(torch.tensor([1, 0]).to(device))
            cache.batch_select_indices(torch.tensor([0]).to(device))
            read.append(model(ids[:, :1], past_key_values=cache).logits)
        return [*read, cache.nbytes]

    on_both(run, tolerance=2e-3)


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TransformersStepper, RecomputeStepper, StaticStepper, CompiledStepper, FastDecoder])
@pytest.mark.parametrize("where", ["host", "device"])
def test_steppers(kind, where):
    """Guards against a prompt on the host that meets weights on the device, and static buffers made on the host."""

    fixed = kind in (StaticStepper, CompiledStepper)  # their buffers have a size

    def run(device):
        model = tiny(11).to(device)
        stepper = FastDecoder.from_model(model) if kind is FastDecoder else kind(model, *(64,) * fixed)
        ids = prompt(9, 2).to(device if where == "device" else "cpu")
        return generate(stepper, ids, 8).sequences

    on_both(run)


def test_sampling_draws_on_the_device():
    """Guards against a uniform number drawn by the host's generator for the device's distribution."""
    logits = random("cuda", 3, 50)
    on_both(lambda device: probabilities(random(device, 3, 50), 0.7, 20, 0.9))
    draws = [sample(logits.softmax(-1), torch.Generator("cuda").manual_seed(seed)).tolist() for seed in (1, 1, 2, 3)]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) > 1
    with pytest.raises(RuntimeError, match="generator"):
        sample(logits.softmax(-1), torch.Generator())
    texts = [
        generate(
            FastDecoder.from_model(tiny(11).cuda()), prompt(5, 1), 8, temperature=1.0, top_p=0.9,
            generator=torch.Generator("cuda").manual_seed(seed),
        ).sequences.tolist()
        for seed in (4, 4)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_the_acceptance_rule():
    """Guards against flags and residuals that are computed on two devices."""

    def run(device):
        draft, target = random(device, 3, 20).softmax(-1), random(device, 4, 20, seed=1).softmax(-1)
        tokens = torch.tensor([3, 4, 5]).to(device)
        return verify(tokens, draft, target, torch.tensor([0.1, 0.2, 0.99]).to(device))

    on_both(run)


@pytest.mark.parametrize("lookup", [False, True])
def test_speculation(lookup):
    """Guards against drafted ids that are collected on the host and verified on the device."""

    def run(device):
        target = tiny(11)
        draft = PromptLookupDraft() if lookup else ModelDraft(like(target, 0.08).to(device))
        return SpeculativeDecoder(target.to(device), draft, 3).generate(prompt(9, 3), 12).sequences

    on_both(run)


# -- batching, quality, weights ----------------------------------------------------------------------------------------


def test_continuous_batching():
    """Guards against page tables, positions and rows of a batch that lie on the host; sampling rows among them."""

    def run(device):
        options = EngineOptions(64, 4, scheduler=SchedulerOptions(max_running=4, token_budget=16))
        engine = BatchingEngine(tiny(11).to(device), options)
        for seed in range(4):
            engine.submit(prompt(5 + 4 * seed, seed)[0].tolist(), 6)
        done = engine.run()
        return [done[i].generated for i in sorted(done)]

    on_both(run)
    engine = BatchingEngine(tiny(11).cuda(), EngineOptions(64, 4))
    sampling = Sampling(temperature=1.0, top_k=10, seed=3)
    first, second = (engine.submit(prompt(7, 1)[0].tolist(), 5, sampling=sampling) for _ in range(2))
    done = engine.run()
    assert done[first].generated == done[second].generated


def test_quality():
    """Guards against texts scored on the host with logits of the device, and reports that hold device tensors."""

    def run(device):
        model, changed = tiny(11), like(tiny(11), 0.02)
        model, changed = model.to(device), changed.to(device)
        ids = prompt(40, 5).to(device)
        report = regression_test(model, changed, {"a case": ids[:, :20]}, new_tokens=4, rounds=1)
        return [
            perplexity(model, ids),
            perplexity(model, ids.cpu()),
            perplexity(model, ids, cache=Int8KVCache(model.config), chunk_size=5),
            perplexity(FastDecoder.from_model(model), ids),
            drift(model, ids, lambda: Int8KVCache(model.config, residual_length=4)).mean_kl,
            len(str(report)) > 0,
        ]

    on_both(run, tolerance=1e-3)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_models(weights):
    """Guards against scales left behind when a layer is made on, or moved to, the device."""

    def run(device):
        model = tiny(11, hidden_size=128, intermediate_size=256).to(device)
        quantize_(model, weights, keep_bfloat16=True)
        return model(prompt(12, 1).to(device)).logits.detach()

    assert (run("cuda").cpu() - run("cpu")).norm() / run("cpu").norm() < 0.05


def test_a_quantised_layer_moves_there_and_back():
    """Guards against packed buffers that stay behind."""
    layer = Int8Linear.from_linear(nn.Linear(64, 32))
    before = layer.dequantize().clone()
    assert torch.equal(layer.cuda().cpu().dequantize(), before)


# -- time --------------------------------------------------------------------------------------------------------------


def test_timers_wait_for_the_device(gpu):
    """Guards against events read before they are done, and a timer that waits at every mark."""
    x, timer = random("cuda", 8, 8), LatencyTimer("cuda")
    waits = len(gpu.syncs) if gpu else 0
    for _ in range(3):
        with timer.stage("outer"), timer.stage("inner"):
            x = x @ x.t() / 8
    if gpu:
        assert len(gpu.syncs) == waits, "marks must not wait"
    assert timer.get_elapsed_ms("outer") >= timer.get_elapsed_ms("inner") > 0
    found = measure(lambda: x @ x.t(), warmup=1, repeats=3, device="cuda")
    assert len(found.samples_ms) == 3 and found.median_ms > 0
    assert set(compare({"a": lambda: x + 1, "b": lambda: x @ x}, rounds=2, device="cuda").samples_ms) == {"a", "b"}


def test_the_benchmark_answers(tokenizer):
    """Guards against ids that the tokenizer makes on the host and the model reads on the device."""
    model = tiny(11, vocab_size=49_152).cuda()
    result = InferenceBenchmark(model, tokenizer).run(["Once upon a time"], max_new_tokens=3, warmup=1, repeats=2)
    assert len(result) == 1
