"""What the roofline is held to: PyTorch's own FLOPs and operators, the matmul rate at a shape, and a narrow twin of a
model, which issues the same operators with next to nothing to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_latency import hardware
from llm_latency.arguments import check_count, check_device, check_dtype
from llm_latency.roofline.shapes import shape_of

TWIN_IDS = 64
TWIN_PARAMETERS = 16_000_000  # of the shallow twin, or one layer where that has more
SDPA_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def _sdpa_flop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object) -> int:
    # query [batch, heads, seq_q, head_dim]; key, value [batch, kv_heads, seq_k, head_dim]: two products per query head
    return 2 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


_sdpa_flop._get_raw = True  # the counter's own marker: pass tensors, not shapes


def count_flops(fn: Callable[[], object]) -> int:
    """FLOPs of `fn()` by `torch.utils.flop_counter`.

    Two corrections. PyTorch counts SDPA's kernel on the CPU as nothing, and some releases refuse grouped heads in the
    others: its formula, over query heads, is used for all. And some releases of transformers make the rotary angles by
    a product with an inner size of 1, others by a multiplication: they are no matrix work, and left out.
    """
    kernels = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): _sdpa_flop for name in SDPA_KERNELS}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        fn()
    by_module = counter.get_flop_counts()
    rotary = sum(sum(flops.values()) for name, flops in by_module.items() if name.endswith(".rotary_emb"))
    return counter.get_total_flops() - rotary


class _OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(fn: Callable[[], object]) -> Counter[str]:
    """The ATen operators that `fn()` issues, by name, views left out: each is at least one kernel launch on a GPU.

    Operators inside code made by torch.compile, or replayed as a CUDA graph, are not seen.
    """
    with torch.no_grad(), _OperatorCounter() as counter:
        fn()
    return counter.names


def count_operators(fn: Callable[[], object]) -> int:
    """How many `operators` `fn()` issues."""
    return operators(fn).total()


def matmul_rate(model: object, rows: int, dtype: str = "float32", device: str | torch.device | None = None) -> float:
    """FLOP/s that the seven matrices of one layer reach with `rows` tokens: the prefill's ceiling at its own shape.

    A large square product, as `hardware.ceilings` measures it, is kinder than the narrow matrices of a small model.
    Raises ValueError for a dtype that is not floating point or rows below 1.
    """
    device, kind = check_device(device), check_dtype(dtype)
    check_count("rows", rows)
    shape = shape_of(model)
    # Several layers' worth, so that the weights come from where a prefill finds them and not from the nearest cache.
    sizes = 4 * shape.layer_matrices()
    weights = [torch.full((out, into), 0.5, dtype=kind, device=device) for out, into in sizes]
    inputs = {w.shape[1]: torch.full((rows, w.shape[1]), 0.5, dtype=kind, device=device) for w in weights}

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    flops = sum(2 * rows * weight.numel() for weight in weights)
    with torch.no_grad():
        return flops / hardware.best_seconds(multiply, device, repeats=5)


def narrow_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A random model of the same architecture, depth, dtype, device and attention, 64 wide.

    A pass through it issues as many operators as one through the model, so its time is what issuing them takes: Python,
    dispatch, launches. The roofline knows only work, and this is what it leaves out (`launch_ms_per_pass` of
    `predict_request`). It takes ids from 0 to 63. Raises as `shape_of` for a model of another architecture.
    """
    shape = shape_of(model)
    return _random_twin(
        model,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1 if shape.kv_heads < shape.heads else 2,
        head_dim=32,
    )


def shallow_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A random model as wide as the model, with a few of its layers and next to no vocabulary.

    What it does in a second, any decoder of its kind does with the matrices of all layers. It takes ids from 0 to 63.
    """
    shape = shape_of(model)
    layer = sum(out * into for out, into in shape.layer_matrices())
    layers = min(shape.layers, max(1, TWIN_PARAMETERS // layer))
    return _random_twin(model, num_hidden_layers=layers, layer_types=None)  # which lists the kinds of all layers


def _random_twin(model: PreTrainedModel, **sizes: int | None) -> PreTrainedModel:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = type(model.config).from_dict(model.config.to_dict() | {"vocab_size": TWIN_IDS} | special | sizes)
    attention = model.config._attn_implementation
    with torch.random.fork_rng(devices=[]):  # a twin made between two seeded draws must not change the second
        torch.manual_seed(0)
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=attention)
    return twin.to(model.device).eval().requires_grad_(False)
