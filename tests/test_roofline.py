"""The roofline's counts against PyTorch's own, its bytes against real tensors, its times against arithmetic by hand."""

from __future__ import annotations

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from properties import property_settings
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config

from every_millisecond.laboratory import counting
from every_millisecond.notebook.roofline_figure import RooflinePoint, draw_roofline
from llm_latency import roofline
from llm_latency.compat import with_cache
from llm_latency.hardware import Ceilings
from llm_latency.roofline import SHAPES, NumberFormat, Peak, Work, total

matplotlib.use("Agg")


@pytest.fixture
def plain_llama():
    """A Llama with as many KV heads as query heads, an untied head, odd sizes and every bias there is."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=30, intermediate_size=35, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=14, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(params=["tiny_llama", "tiny_qwen2", "plain_llama"])
def model(request):
    return request.getfixturevalue(request.param)


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(0, 60, (batch, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 37), (3, 8)])
@pytest.mark.parametrize("logits", ["last", "all"])
def test_prefill_flops_equal_pytorchs_counter(model, attention, batch, tokens, logits):
    """A forgotten matrix, a head counted over the wrong positions, KV heads taken for query heads."""
    model.set_attn_implementation(attention)
    keep = 1 if logits == "last" else 0
    counted = counting.count_flops(lambda: model(ids(batch, tokens), use_cache=False, logits_to_keep=keep))
    work = roofline.forward_work(model, tokens, batch=batch, logits=logits)
    assert total(work).flops == counted


@pytest.mark.parametrize("new", [1, 4])
def test_decode_flops_equal_pytorchs_counter(model, new):
    """A context that is off by the new tokens themselves."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(2, 21), **with_cache(cache))
    counted = counting.count_flops(lambda: model(ids(2, new), **with_cache(cache)))
    assert total(roofline.forward_work(model, new, context=21, batch=2, logits="all")).flops == counted


def test_an_answers_decode_is_one_pass_fewer_than_its_tokens(tiny_llama):
    """The first new token comes out of the prefill: counting it twice makes every prediction a step too long."""
    cache = DynamicCache(config=tiny_llama.config)

    def answer(new: int):
        for _ in range(new - 1):
            tiny_llama(ids(1, 1), **with_cache(cache))

    with torch.no_grad():
        tiny_llama(ids(1, 9), **with_cache(cache))
    counted = counting.count_flops(lambda: answer(6))
    assert total(roofline.decode_work(tiny_llama, 9, 6)).flops == counted
    assert total(roofline.decode_work(tiny_llama, 9, 1)) == Work()


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "int4"])
def test_an_answers_decode_is_the_sum_of_its_steps(tiny_llama, cache, steps):
    """It is computed as a line's sum: a count that does not grow evenly would be wrong for every answer."""
    options = {"batch": 3, "cache": cache, "weights": "int4"}
    whole = roofline.decode_work(tiny_llama, 7, steps + 1, **options)
    passes = [roofline.forward_work(tiny_llama, 1, context=7 + done, **options) for done in range(steps)]
    assert whole == {part: sum((each[part] for each in passes), Work()) for part in whole}


def test_decode_without_a_cache_reads_everything_again(tiny_llama):
    """Rung 0's prediction: each step is a prefill of the whole sequence so far."""
    counted = counting.count_flops(lambda: [tiny_llama(ids(1, n), use_cache=False, logits_to_keep=1) for n in (8, 9)])
    assert total(roofline.decode_work(tiny_llama, 7, 3, kv_cache=False)).flops == counted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameter_bytes_equal_the_real_tensors(model, dtype):
    """A tied head counted twice, a bias or a norm forgotten."""
    model = model.to(getattr(torch, dtype))
    real = sum(p.numel() * p.element_size() for p in model.parameters())
    assert roofline.parameter_bytes(model, dtype) == real
    assert roofline.shape_of(model).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 23])
def test_cache_bytes_equal_the_real_tensors(model, dtype, tokens):
    """Query heads taken for KV heads makes a grouped model's cache several times too large."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.to(getattr(torch, dtype))(ids(2, tokens), **with_cache(cache))
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert roofline.cache_bytes(model, tokens, batch=2, cache=dtype) == real
    work = total(roofline.forward_work(model, tokens, batch=2, weights=dtype))
    assert work.cache_read_bytes == work.cache_write_bytes == real


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_matrix_bytes_equal_the_packed_tensors(dtype):
    """Scales left out of the count: INT4 in blocks of 32 is 5 bits a weight, not 4."""
    from llm_latency import quantization

    kind = {"int8": quantization.Int8Linear, "int4": quantization.Int4Linear}[dtype]
    for rows, columns in ((64, 128), (192, 96)):
        packed = kind.from_weight(torch.randn(rows, columns), None)
        assert roofline.number_format(dtype).nbytes(rows, columns) == packed.nbytes


def test_number_formats_by_hand():
    """Rounding down where a row's last group or last byte is not full loses bytes silently."""
    assert roofline.number_format("int4").nbytes(1, 33) == 17 + 2 * 4
    assert NumberFormat("int4", 4, group_size=128, group_bytes=4).nbytes(10, 256) == 10 * (128 + 8)
    assert roofline.number_format("int8").nbytes(3, 5) == 3 * (5 + 2)
    assert roofline.number_format("float32").nbytes(0, 7) == roofline.number_format("int8").nbytes(7, 0) == 0
    assert roofline.cache_bytes("llama-2-7b", 1000, cache="int8") / roofline.cache_bytes("llama-2-7b", 1000) == 65 / 128


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("smollm2-1.7b", 1_711_376_384),
        ("llama-2-7b", 6_738_415_616),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-2-13b", 13_015_864_320),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name, parameters):
    """A mistyped size in SHAPES, against the number each model's card gives."""
    assert SHAPES[name].parameters == parameters
    assert roofline.parameter_bytes(name, "float16") == 2 * parameters


@pytest.mark.model
def test_counts_on_the_courses_own_model(target):
    """The named shape must be the very model that the notebooks measure."""
    shape = roofline.shape_of(target)
    assert total(roofline.prefill_work(shape, 19)) == total(roofline.prefill_work("smollm2-135m", 19))
    counted = counting.count_flops(lambda: target(ids(1, 19), use_cache=False, logits_to_keep=1))
    assert total(roofline.prefill_work(shape, 19)).flops == counted
    assert roofline.parameter_bytes(shape, "float32") == sum(p.nbytes for p in target.parameters())


@given(tokens=st.integers(1, 400), context=st.integers(0, 400), batch=st.integers(1, 5))
@property_settings(30)
def test_work_only_grows(tokens, context, batch):
    """A second piece of a prompt costs no more than the whole, and reads every weight and every key all the same."""
    whole = total(roofline.forward_work("smollm2-135m", context + tokens, batch=batch))
    second = total(roofline.forward_work("smollm2-135m", tokens, context=context, batch=batch))
    assert 0 < second.flops <= whole.flops
    assert second.weight_bytes == whole.weight_bytes
    assert second.cache_read_bytes == whole.cache_read_bytes
    assert second.cache_write_bytes <= whole.cache_write_bytes


def test_decode_of_a_7b_model_on_an_a100_by_hand():
    """The course's most quoted number: 13.5 GB less the embedding table, over 2039 GB/s, is 6.5 ms a token."""
    decode = roofline.predict_request("llama-2-7b", roofline.gpu_peak("A100-80GB-SXM"), new_tokens=2)["decode"]
    weights = 2 * (6_738_415_616 - 32000 * 4096)
    cache = 2 * 32 * 2 * 4096 * (257 + 1)  # 257 keys and values read, one written
    by_hand = (weights + cache) / 2039e9 * 1e3
    assert decode.ms == pytest.approx(by_hand, rel=1e-3)  # the rest is activations
    assert decode.bound == "bandwidth"
    assert decode.ms == pytest.approx(sum(part.ms for part in decode.parts))


def test_prefill_is_compute_bound_and_by_hand():
    """A prediction that forgets to take the longer of the two limits."""
    prefill = roofline.predict_request("llama-2-7b", roofline.gpu_peak("A100-80GB-SXM"), prompt_tokens=512)["prefill"]
    assert prefill.bound == "compute"
    assert prefill.ms == pytest.approx(prefill.work.flops / 312e12 * 1e3, rel=0.06)
    assert prefill.ms >= max(prefill.compute_ms, prefill.bandwidth_ms)


def test_launches_add_on_a_cpu_and_overlap_on_a_gpu():
    """A small model on a fast machine is bound by launches, which no roofline shows."""
    parts = {"ffn": Work(flops=10**9, weight_bytes=10**9)}
    cpu, gpu = Peak("cpu", 1e9, 1e12), Peak("gpu", 1e9, 1e12, launches_overlap=True)
    assert roofline.predict_stage("decode", parts, cpu, launch_ms=500).ms == pytest.approx(1500)
    assert roofline.predict_stage("decode", parts, gpu, launch_ms=500).ms == pytest.approx(1000)
    late = roofline.predict_stage("decode", parts, gpu, launch_ms=1500)
    assert (late.ms, late.bound) == (pytest.approx(1500), "launch")


def test_share_of_limit_by_hand():
    """The wrong limit named, or the fraction upside down."""
    peak = Peak("by hand", 100.0, 1000.0)
    share = roofline.share_of_limit(Work(flops=100, weight_bytes=50), 1000, peak)
    assert (share.fraction, share.limit, str(share)) == (0.5, "bandwidth", "50% of bandwidth")
    assert roofline.share_of_limit(Work(flops=5000, weight_bytes=50), 10_000, peak).limit == "compute"
    assert roofline.share_of_limit(Work(), 1, peak).fraction == 0
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="measured_ms"):
            roofline.share_of_limit(Work(), bad, peak)


def test_measured_peak_picks_the_dtypes_own_ceilings():
    """FP32's ceilings used for BF16, or a missing dtype silently replaced."""
    gemv, matmul = {"float32": 40.0, "bfloat16": 31.0}, {"float32": 218.0, "bfloat16": 901.0}
    here = Ceilings("cpu", "a CPU", 2, 49, 45, gemv, matmul)
    assert roofline.measured_peak(here, "bfloat16") == Peak("a CPU", 31e9, 901e9)
    assert roofline.measured_peak(here, "int4") == Peak("a CPU", 49e9, 901e9)
    with pytest.raises(ValueError, match="float16"):
        roofline.measured_peak(here, "float16")
    # A CPU without BF16 units: 1.4 GFLOP/s of BF16 products is no limit to a kernel that widens to FP32 first.
    widened = Ceilings("cpu", "a CPU", 2, 49, 45, gemv, {"float32": 218.0, "bfloat16": 1.4})
    assert roofline.measured_peak(widened, "bfloat16") == Peak("a CPU", 31e9, 218e9)


def test_operators_are_counted_without_views():
    """Views launch nothing; counting them makes every model look launch-bound."""
    x = torch.ones(4, 4)
    assert counting.count_operators(lambda: (x + 1).view(16).t().mul(2)) == 2
    assert counting.count_operators(lambda: None) == 0


def test_the_narrow_twin_issues_the_models_operators(model):
    """A twin with fewer layers, or without biases or groups, would report too small a cost of launches."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    twin = counting.narrow_twin(model)
    assert torch.equal(torch.rand(1), expected), "making a twin changed the caller's random numbers"
    counts = [counting.count_operators(lambda m=m: m(ids(1, 4), use_cache=False)) for m in (model, twin)]
    assert counts[0] == counts[1] > 50
    assert twin.config.model_type == model.config.model_type and twin.dtype == model.dtype
    assert twin.config._attn_implementation == model.config._attn_implementation


def test_matmul_rate_runs_and_refuses(tiny_llama):
    """A rate at a shape, in FLOP/s; packed dtypes have no plain matrix product."""
    assert counting.matmul_rate(tiny_llama, 5, "float32", "cpu") > 0
    with pytest.raises(ValueError, match="int8"):
        counting.matmul_rate(tiny_llama, 5, "int8")
    with pytest.raises(ValueError, match="rows=0"):
        counting.matmul_rate(tiny_llama, 0)


def test_unknown_names_and_architectures_are_refused():
    """A model of another architecture must not be counted as if it were a Llama."""
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="gpt2"):
        roofline.shape_of(GPT2Config())
    with pytest.raises(TypeError, match="model_type"):
        roofline.shape_of(3)
    with pytest.raises(KeyError, match="llama-2-7b"):
        roofline.shape_of("llama-9")
    with pytest.raises(KeyError, match="A100-80GB-SXM"):
        roofline.gpu_peak("Z9")
    with pytest.raises(ValueError, match="int3"):
        roofline.parameter_bytes("llama-2-7b", "int3")


def test_bad_sizes_are_refused_by_name():
    """Negative sizes give negative times, which look like a gain."""
    for options, name in (
        ({"new_tokens": 0}, "new_tokens=0"),
        ({"new_tokens": 1, "context": -1}, "context=-1"),
        ({"new_tokens": 1, "batch": 0}, "batch=0"),
    ):
        with pytest.raises(ValueError, match=name):
            roofline.forward_work("smollm2-135m", **options)
    with pytest.raises(TypeError, match=r"new_tokens=1\.5"):
        roofline.forward_work("smollm2-135m", 1.5)
    with pytest.raises(ValueError, match="logits"):
        roofline.forward_work("smollm2-135m", 1, logits="first")
    with pytest.raises(ValueError, match="new_tokens=0"):
        roofline.decode_work("smollm2-135m", 5, 0)
    with pytest.raises(ValueError, match="tokens=-3"):
        roofline.cache_bytes("smollm2-135m", -3)
    with pytest.raises(ValueError, match="hidden=-4"):
        roofline.ModelShape("bad", 1, -4, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="kv_heads=2"):
        roofline.ModelShape("bad", 1, 4, 1, 3, 2, 1, 1)
    with pytest.raises(ValueError, match="above 0"):
        Peak("none", 0, 1)
    with pytest.raises(ValueError, match="launch_ms"):
        roofline.predict_stage("x", {}, Peak("p", 1, 1), launch_ms=-1)
    with pytest.raises(ValueError, match="bits"):
        NumberFormat("int3", 3)
    with pytest.raises(ValueError, match="negative"):
        roofline.number_format("int8").nbytes(-1, 2)


def test_nan_is_refused_where_it_would_become_a_prediction():
    """NaN is neither above nor below 0, and passes a check that asks only for one of them."""
    with pytest.raises(ValueError, match="above 0"):
        Peak("broken", float("nan"), 1e12)
    with pytest.raises(ValueError, match="launch_ms=nan"):
        roofline.predict_stage("decode", {}, Peak("x", 1e9, 1e12), launch_ms=float("nan"))


def test_a_sliding_window_is_not_counted_as_full_attention():
    """Beyond its window a Mistral reads less than the formula says: refuse rather than be wrong."""
    mistral = MistralConfig()
    assert roofline.shape_of(mistral).sliding_window == 4096
    roofline.forward_work(mistral, 4096)
    with pytest.raises(ValueError, match="sliding window of 4096"):
        roofline.forward_work(mistral, 1, context=4096)
    assert roofline.shape_of(Qwen2Config()).sliding_window is None


def test_a_roofline_is_drawn_with_its_points_below_it():
    """Points and roof in different units would put every stage above the roof."""
    figure, ax = plt.subplots()
    peak = Peak("by hand", 1e11, 1e12)
    draw_roofline(ax, peak, [RooflinePoint("decode", 1.0, 5e10, "tab:blue")])
    roof, point = ax.lines[0], ax.lines[1]
    assert point.get_xydata().tolist() == [[1.0, 50.0]]
    assert max(roof.get_ydata()) == 1000 and roof.get_ydata()[0] == pytest.approx(100 * roof.get_xdata()[0])
    with pytest.raises(ValueError, match="decode"):
        draw_roofline(ax, peak, [RooflinePoint("decode", 0.0, 5e10, "tab:blue")])
    plt.close(figure)
