"""Continuous batching: the same tokens as alone, no lost page, and latencies that count the waiting."""

from __future__ import annotations

import copy
import math
import random

import kernel_toys
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from every_millisecond.laboratory import batching_bench as bench
from every_millisecond.laboratory.paged_waste import count_waste
from every_millisecond.laboratory.static_batching import generate_static, left_pad
from every_millisecond.laboratory.workload import Ask, Deadline, mixed_asks, poisson_arrivals, report, serve
from llm_latency.batching import (
    BatchingEngine,
    EngineOptions,
    RequestRefused,
    Sampling,
    SchedulerOptions,
    State,
)
from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.generation import TransformersStepper, generate


class Clock:
    """Seconds that pass only when told to, or by a fixed amount at each reading."""

    def __init__(self, tick: float = 0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class InKernel:
    """A model that is served by the kernel, whose blocks hold 16 tokens."""

    def __init__(self, model):
        self.model, self.lone = model, KernelDecoder.from_model(model, threads=1)


def make_engine(model, *, pages=64, size=4, running=8, budget=32, caching=True, clock=None):
    """An engine whose pool holds pages * size tokens."""
    scheduler = SchedulerOptions(max_running=running, token_budget=budget)
    if isinstance(model, InKernel):
        pages, size = pages * size // 16, 16
        model = KernelDecoder.from_model(model.model, blocks=pages, threads=2)
    options = EngineOptions(num_blocks=pages, block_size=size, prefix_caching=caching, scheduler=scheduler)
    return BatchingEngine(model, options, clock=clock or Clock(1e-3))


def random_prompts(count, seed=0, longest=40, vocab=97):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def alone(model, prompt, new, **options) -> list[int]:
    stepper = model.lone if isinstance(model, InKernel) else TransformersStepper(model)
    output = generate(stepper, torch.tensor([prompt]), new, **options)
    return output.sequences[0, len(prompt) :].tolist()


def in_kernel(model) -> InKernel:
    if kernel_library.problem():
        pytest.skip(kernel_library.problem())
    return InKernel(model)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def kernel_toy(request):
    return in_kernel(kernel_toys.make_toy(request.param))


@pytest.fixture(scope="module")
def kernel_llama():
    return in_kernel(kernel_toys.make_toy("llama"))


@pytest.fixture(params=["tiny_llama", "kernel_llama"])
def served(request):
    """What the engine can serve: a transformers model, and one in the kernel."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("model_name", ["tiny_llama", "tiny_qwen2", "kernel_llama"])
@pytest.mark.parametrize("pages", [64, 17])
def test_tokens_are_those_of_a_lone_run(model_name, pages, request):
    """Fault: neighbours, page order, chunks of a prompt, biases, preemption or the prefix cache change an answer."""
    model = request.getfixturevalue(model_name)
    prompts = random_prompts(12)
    prompts[5] = [*prompts[3][:20], 5, 6, 7]  # shares a beginning
    new = [1 + 3 * i % 17 for i in range(12)]
    engine = make_engine(model, pages=pages, budget=11)
    ids = []
    for prompt, count in zip(prompts, new, strict=True):
        ids.append(engine.submit(prompt, count))
        engine.step()
    done = engine.run()
    for i, prompt, count in zip(ids, prompts, new, strict=True):
        assert done[i].generated == alone(model, prompt, count)
    if pages == 17:
        assert sum(r.preemptions for r in done.values()) > 0, "this pool was meant to be too small"
    assert engine.cache.manager.num_free == engine.options.num_blocks
    engine.cache.manager.check()
    if not isinstance(model, InKernel):
        assert model.config._attn_implementation == "sdpa", "the model was left with paged attention"


@pytest.mark.parametrize("pages", [80, 17])
def test_a_kernels_request_has_the_bits_of_a_lone_run(kernel_toy, pages):
    """Fault: an answer that depends on its company, which a near tie turns into another text: chunks of a prompt,
    pages, the prefix cache and preemption may change no bit of any logits."""
    prompts = random_prompts(9, seed=8)
    prompts[5] = [*(prompts[3] * 40)[:33], 5, 6]
    prompts[6] = [*prompts[5][:32], 7, 8, 9]  # shares two blocks
    engine = make_engine(kernel_toy, pages=pages, budget=13)
    found: dict[int, list[torch.Tensor]] = {}
    choose = engine._choose

    def note(logits, requests):
        for row, request in zip(logits, requests, strict=True):
            found.setdefault(request.id, []).append(row.clone())
        return choose(logits, requests)

    engine._choose = note
    ids = []
    for i, prompt in enumerate(prompts):
        ids.append(engine.submit(prompt, 2 + 3 * i % 11))
        engine.step()
    done = engine.run()
    for i, prompt in zip(ids, prompts, strict=True):
        text = torch.tensor([[*prompt, *done[i].generated]])
        expected = kernel_toy.lone.score(text)[0, len(prompt) - 1 : -1]
        assert torch.equal(torch.stack(found[i]), expected), f"request {i}"
    assert engine.cache.manager.prefix_hits > 0
    assert pages == 80 or sum(r.preemptions for r in done.values()) > 0


def test_the_kernels_pool_is_the_engines(kernel_llama):
    """Fault: a manager that counts other blocks than the kernel has hands out some that are not there."""
    decoder = KernelDecoder.from_model(kernel_llama.model, blocks=8, max_length=64)
    assert BatchingEngine(decoder).cache.manager.num_blocks == 8
    for options in (EngineOptions(num_blocks=9), EngineOptions(num_blocks=8, block_size=4)):
        with pytest.raises(ValueError, match="the kernel's pool has 8 of 16"):
            BatchingEngine(decoder, options)
    with pytest.raises(RequestRefused, match="need 65 positions; this model has 64"):
        BatchingEngine(decoder).submit([1] * 60, 5)


def test_numbers_that_are_not_finite_end_the_kernels_requests(kernel_llama):
    """Fault: words from NaN; or a pass that raises and leaves requests for which nobody computes any more."""
    broken = copy.deepcopy(kernel_llama.model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = math.nan
    engine = make_engine(InKernel(broken))
    ids = [engine.submit([1, 9, 3], 4), engine.submit([1, 2], 4)]
    with pytest.raises(ValueError, match="NaN"):
        engine.step()
    assert all(engine.done[i].state is State.FAILED for i in ids) and not engine.busy
    later = engine.submit([1, 2, 3], 4)
    assert engine.run()[later].generated == alone(kernel_llama, [1, 2, 3], 4)
    assert engine.cache.manager.num_free == engine.options.num_blocks


def test_prompt_cached_entirely_gives_the_same_tokens(served):
    """Fault (case 27): the second of two equal prompts has nothing left to compute, so no logits, or other ones."""
    engine = make_engine(served, size=4)
    size = engine.options.block_size
    prompt = (random_prompts(1, seed=3)[0] * 64)[: 4 * size]
    for _ in range(3):
        engine.submit(prompt, 6)
        engine.run()
    first, second, third = (engine.done[i] for i in range(3))
    assert first.generated == second.generated == third.generated == alone(served, prompt, 6)
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * size)


def test_sampled_tokens_do_not_depend_on_the_company(served):
    """Fault: one generator for the whole batch, so that an answer changes with who else is there."""
    prompts = random_prompts(5, seed=4)
    sampling = [Sampling(temperature=0.8, top_k=20, seed=i) for i in range(5)]
    engine = make_engine(served)
    for prompt, how in zip(prompts, sampling, strict=True):
        engine.submit(prompt, 9, sampling=how)
    engine.run()
    for i, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(i)
        expected = alone(served, prompt, 9, temperature=0.8, top_k=20, generator=generator)
        assert engine.done[i].generated == expected
    with pytest.raises(ValueError, match="seed"):
        engine.submit([1], 1, sampling=Sampling(temperature=1.0))


def test_too_large_is_refused_and_the_others_go_on(tiny_llama):
    """Fault (case 26): a request that can never fit waits for ever and blocks the queue behind it."""
    engine = make_engine(tiny_llama, pages=6, size=4)
    engine.submit([1, 2, 3], 4)
    with pytest.raises(RequestRefused, match="need 7 blocks; the whole pool has 6"):
        engine.submit([1] * 20, 6)
    with pytest.raises(RequestRefused, match="positions"):
        make_engine(tiny_llama, pages=999).submit([1] * 500, 13)
    engine.submit([1] * 20, 5)  # exactly fits: the last token is never stored
    done = engine.run()
    assert [len(done[i].generated) for i in done] == [4, 5]


def test_invalid_requests_are_named(tiny_llama):
    """Fault: an empty prompt or an id outside the vocabulary fails within the model, or passes."""
    engine = make_engine(tiny_llama)
    with pytest.raises(ValueError, match="empty"):
        engine.submit([], 1)
    with pytest.raises(ValueError, match="97"):
        engine.submit([97], 1)
    with pytest.raises(ValueError, match="-1"):
        engine.submit([3, -1], 1)
    for bad in ([1.5], [True], torch.tensor([1.5])):
        with pytest.raises(TypeError, match="int"):
            engine.submit(bad, 1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        engine.submit([1], 0)
    with pytest.raises(TypeError, match="max_new_tokens"):
        engine.submit([1], True)
    with pytest.raises(ValueError, match="one request"):
        engine.submit(torch.ones(2, 3, dtype=torch.int64), 1)
    with pytest.raises(TypeError, match=r"eos_token_id=\[2, 3\]"):
        engine.submit([1], 1, eos_token_id=[2, 3])
    assert not engine.busy and engine.step() == []
    for options in ({"max_running": 0}, {"token_budget": 3}):
        with pytest.raises(ValueError):
            SchedulerOptions(**options)
    with pytest.raises(ValueError, match="block_size"):
        EngineOptions(block_size=0)


def test_cancelled_requests_give_their_pages_back(served):
    """Fault: a user who leaves keeps pages; a waiting, half-read or preempted request cannot be cancelled."""
    engine = make_engine(served, pages=24, size=4, running=3, budget=8, caching=False)
    for prompt in ([1] * 6, [2] * 30, [3] * 5, [4] * 5):
        engine.submit(prompt, 10)
    for _ in range(3):
        engine.step()
    states = [engine._live[i].state for i in range(4)]
    assert State.RUNNING in states and State.WAITING in states
    assert 0 < engine._live[1].stored < 30, "the second was meant to be half read"
    assert engine.cancel(1) and engine.cancel(3)
    engine.cache.manager.check()
    done = engine.run()
    assert [done[i].state for i in range(4)] == [State.FINISHED, State.CANCELLED, State.FINISHED, State.CANCELLED]
    assert done[0].generated == alone(served, [1] * 6, 10)
    assert engine.cache.manager.num_free == engine.options.num_blocks
    assert engine.cancel(1) is False
    with pytest.raises(KeyError, match="no request 9"):
        engine.cancel(9)


def test_end_of_text_ends_the_request(served):
    """Fault: an answer runs on to max_new_tokens; or token 0 counts as the end (case 14)."""
    prompt = [5, 6, 7]
    tokens = alone(served, prompt, 8)
    stop = next(t for t in tokens if tokens.index(t) == 2) if len(set(tokens)) > 2 else tokens[0]
    engine = make_engine(served)
    engine.submit(prompt, 8, eos_token_id=stop)
    seen = []
    while engine.busy:
        seen.extend(engine.step())
    expected = tokens[: tokens.index(stop) + 1]
    assert engine.done[0].generated == [n.token_id for n in seen] == expected
    assert [n.last for n in seen] == [False] * (len(expected) - 1) + [True]


def test_a_broken_request_does_not_take_the_others_along(tiny_llama):
    """Fault: NaN from one request reaches others through reused pages, or ends the whole server."""
    engine = make_engine(tiny_llama, pages=8, size=4, caching=False)
    with torch.no_grad():
        tiny_llama.model.embed_tokens.weight[9] = math.nan
        tiny_llama.lm_head.weight = torch.nn.Parameter(tiny_llama.lm_head.weight.nan_to_num(0.0))
    engine.submit([1, 9, 3], 4)
    engine.submit([1, 2, 3], 4)
    done = engine.run()
    assert done[0].state is State.FAILED and "NaN" in done[0].error
    for prompt in ([4] * 9, [5] * 7):
        engine.submit(prompt, 5)
    engine.run()
    assert [r.state for r in done.values()] == [State.FAILED] + [State.FINISHED] * 3
    assert done[2].generated == alone(tiny_llama, [4] * 9, 5)


@pytest.fixture
def smallest():
    """One layer, so that a thousand requests take seconds."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=97, num_hidden_layers=1, max_position_embeddings=128, **shape)
    ).eval()


@pytest.mark.parametrize("kind", ["transformers", pytest.param("kernel", marks=pytest.mark.long)])
def test_thousand_random_requests(smallest, kind):
    """Fault: a page lost now and then, a request forgotten, a deadlock when half-read prompts fill the pool."""
    rng = random.Random(5)
    served = in_kernel(smallest) if kind == "kernel" else smallest
    engine = make_engine(served, pages=40, size=4, running=12, budget=48)
    asked = refused = 0
    while asked < 1000 or engine.busy:
        if asked < 1000 and rng.random() < 0.97:
            asked += 1
            shared = [7] * 8 if rng.random() < 0.3 else []
            prompt = shared + [rng.randrange(97) for _ in range(rng.choice((1, 3, 9, 30, 120)))]
            try:
                engine.submit(prompt, rng.choice((1, 2, 5, 12)), eos_token_id=rng.choice((None, 3)))
            except RequestRefused:
                refused += 1
        if engine.busy and rng.random() < 0.03:
            engine.cancel(rng.choice(sorted(engine._live)))
        engine.step()
        if rng.random() < 0.05:
            engine.cache.manager.check()
    states = [r.state for r in engine.done.values()]
    assert len(states) + refused == 1000 and refused > 0
    assert set(states) == {State.FINISHED, State.CANCELLED}
    assert sum(r.preemptions for r in engine.done.values()) > 0
    engine.cache.manager.check()
    assert engine.cache.manager.num_free == engine.options.num_blocks


def test_budget_bounds_every_step(tiny_llama):
    """Fault: a long prompt is read in one go and everybody else's token waits for it."""
    engine = make_engine(tiny_llama, budget=16, running=4)
    sizes = []
    forward = tiny_llama.forward
    tiny_llama.forward = lambda **kw: (sizes.append(kw["input_ids"].shape[1]), forward(**kw))[1]
    engine.submit([1, 2], 12)
    engine.step()
    engine.submit(list(range(90)), 2)
    while engine.busy:
        before = len(engine._live.get(0).generated) if 0 in engine._live else None
        engine.step()
        if before is not None and 0 in engine._live:
            assert len(engine._live[0].generated) == before + 1, "the first request had to wait"
    assert max(sizes) == 16
    assert len(engine.done[1].generated) == 2


def test_models_with_windows_are_refused(tiny_llama):
    """Fault: a model with sliding windows runs and silently attends to everything."""
    engine = make_engine(tiny_llama)
    inner = tiny_llama.model.layers[1].self_attn
    forward = inner.forward
    inner.forward = lambda *args, **kw: forward(*args, **kw, sliding_window=4)
    engine.submit([1, 2], 1)
    with pytest.raises(ValueError, match="sliding_window"):
        engine.step()
    assert tiny_llama.config._attn_implementation == "sdpa"


def test_a_pass_that_raises_leaves_nothing_behind(tiny_llama):
    """Fault: after an interrupted step its tokens are stored twice, and half-written pages enter the prefix cache."""
    engine = make_engine(tiny_llama, running=2)
    inner = tiny_llama.model.layers[1].mlp
    forward = inner.forward
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for _ in range(3):
        engine.submit(prompt, 4)

    def broken(x):
        raise KeyboardInterrupt

    inner.forward = broken
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [engine.done[i].state for i in (0, 1)] == [State.FAILED, State.FAILED]
    inner.forward = forward
    done = engine.run()
    assert done[2].generated == alone(tiny_llama, prompt, 4) and done[2].cached_tokens == 0
    assert engine.cache.manager.num_free == 64


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("place", ["scheduler.schedule", "_forward", "_commit", "_choose", "clock"])
def test_whoever_waits_is_told_of_an_interrupted_step(served, place, error):
    """Fault (case 51): an interrupt beside the forward pass leaves requests that nobody will ever finish, and `run`
    goes round for ever."""
    engine = make_engine(served, running=2)
    ids = [engine.submit([1, 2, 3 + i], 4) for i in range(3)]
    engine.step()
    holder, _, name = place.rpartition(".")
    holder = engine.scheduler if holder else engine
    whole = getattr(holder, name)

    def interrupted(*args):
        setattr(holder, name, whole)
        raise error("stop")

    setattr(holder, name, interrupted)
    with pytest.raises(error):
        engine.step()
    for i in ids[:2]:
        assert engine.done[i].state is State.FAILED and engine.done[i].error == f"{error.__name__}: stop"
    done = engine.run()
    assert done[ids[2]].generated == alone(served, [1, 2, 5], 4)
    assert engine.cache.manager.num_free == engine.options.num_blocks
    engine.cache.manager.check()


def test_ids_are_never_used_again(served):
    """Fault (case 49): an id counted from the requests that are left is that of an older one, and a late `cancel` ends
    somebody else's."""
    engine = make_engine(served)
    seen = []
    for _ in range(3):
        seen += [engine.submit([1, 2], 1), engine.submit([3], 2)]
        engine.step()
        engine.done.clear()
    engine.run()
    assert len(set(seen)) == 6
    with pytest.raises(KeyError, match="no request 0"):
        engine.cancel(0)


def test_what_is_found_is_counted_once(tiny_llama):
    """Fault (case 49): a request that waits for room is opened at every step to see whether it fits, and each time its
    prefix counts as found."""
    engine = make_engine(tiny_llama, pages=12, size=4, running=2)
    prompt = [7] * 17
    engine.submit(prompt, 1)
    engine.run()
    hog = engine.submit([1] * 20, 13)  # 8 of 12 blocks in the end
    engine.step()
    late = engine.submit([*prompt, *[8] * 16], 1)  # waits until the other is done
    engine.run()
    assert engine.done[hog].preemptions == engine.done[late].preemptions == 0
    assert engine.done[late].token_times_s[0] > engine.done[hog].end_s
    assert engine.done[late].cached_tokens > 0
    assert engine.cache.manager.prefix_hits == engine.done[late].cached_tokens


def test_rotations_that_depend_on_the_longest_text_are_refused(tiny_llama):
    """Fault (case 42): one pass for several requests rotates all of them by the longest one's factors."""
    tiny_llama.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"'dynamic'.*share a pass"):
        make_engine(tiny_llama)
    with pytest.raises(ValueError, match=r"'dynamic'.*share a pass"):
        generate_static(tiny_llama, *left_pad([[1, 2], [3]], pad_id=0), [1, 1])


@pytest.mark.model
def test_real_model_in_company_as_alone(target, tokenizer):
    """Fault: right for a toy, wrong at the real head count, page size and vocabulary."""
    texts = ["The capital of France is", "def add(a, b):\n", "Once upon a time"]
    prompts = [tokenizer.encode(text) for text in texts]
    engine = BatchingEngine(target, EngineOptions(num_blocks=64))
    for prompt in prompts:
        engine.submit(prompt, 8)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.done[i].generated == alone(target, prompt, 8)


# --- static batching ---


def test_padded_rows_are_those_of_solo_runs(tiny_llama):
    """Fault (case 30): padding shifts positions or is attended to, so that a shorter prompt gets another answer."""
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]
    ids, mask = left_pad(prompts, pad_id=2)
    assert ids.tolist()[0] == [2, 2, 2, 2, 5, 6, 7]
    rows = generate_static(tiny_llama, ids, mask, [9, 4])
    assert rows == [alone(tiny_llama, prompts[0], 9), alone(tiny_llama, prompts[1], 4)]


def test_right_padding_is_refused(tiny_llama):
    """Fault (case 30): the next token is read off a pad."""
    ids = torch.tensor([[5, 6, 7, 2], [1, 2, 3, 4]])
    with pytest.raises(ValueError, match="right"):
        generate_static(tiny_llama, ids, torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), [1, 1])
    with pytest.raises(ValueError, match="right"):
        generate_static(tiny_llama, ids, torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), [1, 1])
    with pytest.raises(ValueError, match="belong together"):
        generate_static(tiny_llama, ids, torch.ones(2, 4), [1])
    with pytest.raises(ValueError, match="right"):  # differences of bools are an exclusive or, never below 0
        generate_static(tiny_llama, ids, torch.tensor([[True, False, True, True], [True] * 4]), [1, 1])
    with pytest.raises(ValueError, match="0 and 1"):
        generate_static(tiny_llama, ids, 2 * torch.ones(2, 4), [1, 1])
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate_static(tiny_llama, ids, torch.ones(2, 4), [1, 0])
    with pytest.raises(ValueError, match="at least one"):
        left_pad([[1], []], 0)


def test_bad_static_batches_are_named(tiny_llama):
    """Fault: half a token makes a loop without end; positions beyond the model's last give a plausible answer."""
    with pytest.raises(TypeError, match=r"max_new_tokens=1\.5"):
        generate_static(tiny_llama, torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4), [1.5])
    with pytest.raises(ValueError, match="514 positions are needed; this model has 512"):
        generate_static(tiny_llama, torch.ones(1, 500, dtype=torch.int64), torch.ones(1, 500), [14])
    with pytest.raises(ValueError, match="holds 97; expected ids from 0 to 96"):
        generate_static(tiny_llama, torch.tensor([[3, 97]]), torch.ones(1, 2), [1])
    for shape in ((0, 3), (1, 0)):
        with pytest.raises(ValueError, match="at least one row and one token"):
            generate_static(tiny_llama, torch.ones(shape, dtype=torch.int64), torch.ones(shape), [1] * shape[0])


# --- arrivals and latencies ---


def test_arrivals_repeat_and_have_the_right_rate():
    """Fault: arrivals that differ between runs, or whose mean gap is the rate instead of its inverse."""
    times = poisson_arrivals(5.0, 4000, seed=1)
    assert times == poisson_arrivals(5.0, 4000, seed=1) != poisson_arrivals(5.0, 4000, seed=2)
    gaps = torch.tensor(times).diff()
    assert gaps.mean() == pytest.approx(0.2, rel=0.06) and gaps.std() == pytest.approx(0.2, rel=0.08)
    assert poisson_arrivals(1.0, 0, seed=0) == []
    with pytest.raises(ValueError, match="positive rate"):
        poisson_arrivals(0, 3, seed=0)


def test_asks_repeat_and_stay_within_bounds():
    """Fault: lengths outside the bounds, or a workload that no second run can repeat."""
    asks = mixed_asks(200, vocab_size=97, seed=3, prompt_tokens=(3, 20), new_tokens=(1, 9))
    assert asks == mixed_asks(200, vocab_size=97, seed=3, prompt_tokens=(3, 20), new_tokens=(1, 9))
    assert {len(a.prompt) for a in asks} <= set(range(3, 21)) and {a.max_new_tokens for a in asks} <= set(range(1, 10))
    with pytest.raises(ValueError, match="new_tokens"):
        mixed_asks(1, vocab_size=9, seed=0, new_tokens=(3, 2))


def test_a_load_with_an_impossible_request_is_refused_before_it_begins(tiny_llama):
    """Fault: the refusal in the middle of a load leaves the requests before it half done and the engine busy."""
    engine = make_engine(tiny_llama, pages=6, size=4)
    with pytest.raises(RequestRefused, match="whole pool"):
        serve(engine, [Ask((1, 2), 3), Ask((1,) * 40, 3)])
    assert not engine.busy and not engine.done
    assert len(serve(engine, [Ask((1, 2), 3)])[0].generated) == 3


def test_latency_counts_from_arrival(tiny_llama):
    """Fault (case 23): waiting in the queue is not counted; the first token is averaged into the time per token."""
    clock = Clock()
    engine = make_engine(tiny_llama, running=1, clock=clock)
    step = engine.step

    def slow_step():
        clock.now += 0.01
        return step()

    engine.step = slow_step
    asks = [Ask((1, 2, 3), 3, arrival_s=1.0), Ask((4, 5), 1, arrival_s=1.015)]
    first, second = serve(engine, asks, sleep=clock.sleep)
    assert first.time_to_first_token_ms == pytest.approx(10)
    assert first.time_per_output_token_ms == pytest.approx(10)
    assert first.end_to_end_ms == pytest.approx(30)
    assert second.time_to_first_token_ms == pytest.approx(25), "it came at 1.015 s and was served at 1.04 s"
    assert second.time_per_output_token_ms is None
    figures = report([first, second], Deadline(first_token_ms=20))
    assert (figures.requests, figures.finished, figures.tokens, figures.in_time) == (2, 2, 4, 1)
    assert figures.seconds == pytest.approx(0.04)
    assert figures.tokens_per_second == pytest.approx(100)
    assert figures.goodput_per_second == pytest.approx(25)
    assert figures.first_token_ms_p50 == pytest.approx(17.5) and figures.first_token_ms_p90 == pytest.approx(23.5)


def test_cancelled_requests_are_not_in_time(tiny_llama):
    """Fault: a request that ended early counts as served within the deadline."""
    engine = make_engine(tiny_llama)
    engine.submit([1, 2], 5)
    engine.step()
    engine.cancel(0)
    figures = report(list(engine.done.values()), Deadline(first_token_ms=1e9))
    assert (figures.finished, figures.in_time, figures.tokens) == (0, 0, 1)
    assert math.isnan(figures.first_token_ms_p50)
    with pytest.raises(ValueError, match="no requests"):
        report([])
    with pytest.raises(ValueError, match="positive"):
        Deadline(per_token_ms=0)


def test_times_that_do_not_exist_are_errors(tiny_llama):
    """Fault: a request under way reports 0 ms."""
    engine = make_engine(tiny_llama)
    engine.submit([1, 2], 5)
    with pytest.raises(ValueError, match="no token"):
        print(engine._live[0].time_to_first_token_ms)
    with pytest.raises(ValueError, match="not done"):
        print(engine._live[0].end_to_end_ms)
    with pytest.raises(ValueError, match="idle"):
        serve(engine, [])


# --- benchmark ---


def test_benchmark_compares_equal_work(smallest):
    """Fault: the ways do different work, or tokens are counted that nobody asked for."""
    asks = mixed_asks(5, vocab_size=97, seed=0, prompt_tokens=(2, 9), new_tokens=(1, 6))
    result = bench.compare_batching(smallest, asks, batch=2, rounds=1)
    assert result.tokens == sum(ask.max_new_tokens for ask in asks) and result.same == 5
    expected = 1e3 * result.tokens / result.times.median_ms["static"]
    assert result.tokens_per_second("static") == pytest.approx(expected)
    assert "5 of 5" in result.report() and len(result.times.samples_ms) == 3
    with pytest.raises(ValueError, match="at least one"):
        bench.compare_batching(smallest, [])


def test_pages_waste_little_where_one_stretch_wastes_much():
    """Fault: a page size, or a way of counting, that throws the gain of paging away."""
    waste = count_waste()
    assert waste["paged"].waste < 0.04 < 0.40 < waste["contiguous"].waste
    assert waste["paged"].used == waste["contiguous"].used
