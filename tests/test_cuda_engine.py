"""The quantised layers and the fast decoder on CUDA.

`make gpu` runs this on a real GPU, plain pytest on a pretend one.
"""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llm_latency.engine import FastDecoder
from llm_latency.quantization import Int4Linear, Int8Linear, kernels

pytestmark = pytest.mark.cuda


@pytest.fixture
def model():
    """A random FP32 Llama with grouped queries whose widths suit every kernel, on the GPU."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    return model.cuda()


@pytest.fixture
def ids():
    return torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(5)).cuda()


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 rounds FP32 products to ten bits; the oracle must not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("kind", "options"), [(Int8Linear, {}), (Int4Linear, {"group_size": 64})])
@pytest.mark.parametrize(("out", "width"), [(37, 128), (256, 512), (130, 192)])
def test_modules_equal_their_dequantised_form(kind, options, out, width):
    """Guards against CUDA's own packing, padded channels, and widths that its layout does not take."""
    layer = kind.from_linear(nn.Linear(width, out).cuda(), keep_bfloat16=True, **options)
    for rows in (1, 3, 40):
        x = torch.randn(rows, width, device="cuda")
        exact = F.linear(x.bfloat16().float(), layer.dequantize(), layer.bias.float())
        peer = F.linear(x.bfloat16(), layer.dequantize().bfloat16(), layer.bias).float()
        assert (layer(x) - exact).norm() <= 2 * (peer - exact).norm() + 1e-3 * exact.norm()


def test_the_packed_kernel_is_taken():
    """Guards against a layout that fails its check, so that INT4 runs on the plain path for years unnoticed."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the packed INT4 kernel needs compute capability 8.0")
    assert kernels.int4_kernel("cuda", 4096, 32) == "packed"
    assert kernels.int4_kernel("cuda", 4096 + 32, 32) == kernels.PLAIN


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_layers_move_between_devices(kind):
    """Guards against one device's layout read by the other's kernel."""
    layer = kind.from_linear(nn.Linear(128, 48))
    there = copy.deepcopy(layer).cuda()
    assert torch.equal(there.dequantize().cpu(), layer.dequantize())
    assert torch.equal(there.cpu().dequantize(), layer.dequantize())
    fresh = kind.from_linear(nn.Linear(128, 48).cuda())
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.dequantize().cpu(), layer.dequantize())


@pytest.mark.parametrize(
    "options", [{}, {"cuda_graphs": False}, {"compile": True}, {"compile": True, "cuda_graphs": False}]
)
def test_fp32_equals_the_model(model, ids, options):
    """Guards against a graph replayed with old positions, a compiled step that differs, and copied or tiled heads."""
    decoder = FastDecoder.from_model(model, **options)
    with torch.inference_mode():
        expected = model(ids).logits
    assert (decoder.score(ids) - expected).abs().max() < 1e-3
    decoder.prefill(ids[:, :20])
    steps = [decoder.step(token) for token in ids[:, 20:30].split(1, dim=1)]
    assert (torch.cat(steps, dim=1) - expected[:, 20:30]).abs().max() < 1e-3
    together = decoder.step(ids[:, 30:35])  # a verification step of five
    assert (together - expected[:, 30:35]).abs().max() < 1e-3
    decoder.crop_to(30)
    assert (decoder.step(ids[:, 30:31]) - expected[:, 30:31]).abs().max() < 1e-3


def test_two_steps_logits_live_side_by_side(model, ids):
    """Guards against a graph whose second replay overwrites the first one's logits."""
    decoder = FastDecoder.from_model(model)
    decoder.prefill(ids)
    first = decoder.step(ids[:, :1])
    kept = first.clone()
    decoder.step(ids[:, 1:2])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_formats_stay_close(model, ids, weights):
    """Guards against wrong scales in CUDA's kernels."""
    expected = FastDecoder.from_model(copy.deepcopy(model).cpu(), weights).score(ids.cpu())
    got = FastDecoder.from_model(model, weights).score(ids).cpu()
    assert (got - expected).norm() / expected.norm() < 0.05


def test_spans_are_recorded_once(model, ids):
    """Guards against a graph recorded anew at every position: one per 128 slots is enough."""
    decoder = FastDecoder.from_model(model)
    decoder.prefill(ids)
    for position in range(120):
        decoder.step(ids[:, position % 40 : position % 40 + 1])
    assert len(decoder._graph.recordings) == 2  # up to 128 slots, up to 256


def test_graphs_issue_less(model, ids, gpu):
    """Guards against a graph that is recorded and not used: issuing a step must be much cheaper with it.

    On the pretend device, which has no speed, launches are counted: a graph is one.
    """
    times = {}
    for graphs in (True, False):
        decoder = FastDecoder.from_model(model, "bfloat16", cuda_graphs=graphs)
        decoder.prefill(ids)
        for _ in range(5):
            decoder.step(ids[:, :1])
        torch.cuda.synchronize()
        start = gpu.launches if gpu else time.perf_counter()
        for _ in range(20):
            decoder.step(ids[:, :1])
        torch.cuda.synchronize()
        times[graphs] = (gpu.launches if gpu else time.perf_counter()) - start
    assert times[True] < times[False] / (5 if gpu else 1)
