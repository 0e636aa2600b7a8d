"""The contenders: what a user would pick instead, and ours. Each builder returns a function that answers a prompt."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from every_millisecond.ladder import speculation
from llm_latency import models
from llm_latency.timing import LatencyTimer


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt: ms to the first token, ms from there to the last one, and the new ids."""

    prefill_ms: float
    decode_ms: float
    ids: list[int]


Answerer = Callable[[list[int], int], Answer]  # prompt ids, number of new tokens


@dataclass(frozen=True, slots=True)
class Contender:
    """name: in the JSON. title: in the table. build: makes the Answerer, in its own process. ours: from this library.
    package: what must be importable; remedy: what to do where it is not. default_only: runs the bundled model alone.
    draft: the shipped draft that it needs. kernel: it needs the compiled kernel."""

    name: str
    title: str
    build: Callable[[str | None], Answerer]
    ours: bool = False
    package: str | None = None
    remedy: str = ""
    default_only: bool = False
    draft: str | None = None
    kernel: bool = False

    def unavailable(self, profile: str | None) -> str | None:
        """Why this machine cannot run it, with the remedy; or None."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: {self.remedy}"
        default = (profile or models.choose_profile()[0].name) == "smollm2-135m"
        if self.default_only and not default:
            return "it needs files of the bundled model, and this is another model"
        if self.kernel and (reason := speculation.kernel_unavailable()):
            return reason
        return speculation.unavailable(self.draft) if self.draft and default else None


class _Clock:
    """A transformers streamer that notes when tokens come, and how many. The first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


def _transformers(model, **options) -> Answerer:
    @torch.inference_mode()
    def answer(prompt: list[int], new_tokens: int) -> Answer:
        ids = torch.tensor([prompt], device=model.device)
        clock = _Clock()
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,  # an early end of text would shorten one answer and not another
            max_new_tokens=new_tokens,
            streamer=clock,
            **options,
        )
        first, last = clock.times[1], clock.times[-1]
        # Assisted generation hands over its first cycle's tokens together: the pace behind them stands for all tokens
        # but the very first.
        decode = (last - first) * (new_tokens - 1) / max(1, sum(clock.counts[2:]))
        return Answer((last - start - decode) * 1e3, decode * 1e3, out[0, len(prompt) :].tolist())

    return answer


def _stepper(stepper) -> Answerer:
    def answer(prompt: list[int], new_tokens: int) -> Answer:
        timer = LatencyTimer(stepper.device)
        ids = torch.tensor([prompt])
        out = stepper.generate(ids, new_tokens, timer=timer)
        prefill, decode = timer.get_elapsed_ms("prefill"), timer.get_elapsed_ms("decode")
        return Answer(prefill, decode, out.sequences[0, len(prompt) :].tolist())

    return answer


def _hf(dtype: torch.dtype) -> Callable[[str | None], Answerer]:
    return lambda profile: _transformers(models.load_target(profile, dtype=dtype))


def _hf_assisted(dtype: torch.dtype) -> Callable[[str | None], Answerer]:
    """transformers' own speculative decoding, as it comes: it sets the number of drafted tokens itself."""

    def build(profile: str | None) -> Answerer:
        draft = models.load_draft(profile, dtype=dtype)
        return _transformers(models.load_target(profile, dtype=dtype), assistant_model=draft)

    return build


def _speculative(weights: str, draft: str) -> Callable[[str | None], Answerer]:
    return lambda profile: _stepper(speculation.build(profile, weights, draft))


def _compiled(model) -> Answerer:
    from transformers import CompileConfig

    config = CompileConfig()
    config._compile_all_devices = True  # transformers compiles on GPUs alone unless told
    return _transformers(model, cache_implementation="static", compile_config=config)


def _hf_compiled(profile: str | None) -> Answerer:
    return _compiled(models.load_target(profile, dtype=torch.bfloat16))


def _torchao(bits: int, compiled: bool = False) -> Callable[[str | None], Answerer]:
    def build(profile: str | None) -> Answerer:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        model = models.load_target(profile, dtype=torch.bfloat16)
        if bits == 8:
            config = Int8WeightOnlyConfig()
        elif model.device.type == "cuda":
            config = Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d")
        else:
            config = _torchao_int4_for_cpu()
        quantize_(model, config)
        return _compiled(model) if compiled else _transformers(model)

    return build


def _torchao_int4_for_cpu():
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=32)
    except ImportError:  # before torchao 0.18 the layout for CPUs stood in the main configuration
        from torchao.quantization import Int4WeightOnlyConfig

        return Int4WeightOnlyConfig(group_size=32, int4_packing_format="opaque")


def _llama_cpp(*, repack: bool = True, lookup: bool = False) -> Callable[[str | None], Answerer]:
    """llama.cpp set up for speed: as many threads as ours for steps and for the prompt, the whole prompt in one pass,
    its FlashAttention. lookup: its own speculation, which looks the last tokens up in the text and guesses what
    followed them there."""

    def build(profile: str | None) -> Answerer:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        from llm_latency.models import gguf_path

        if not repack:
            defaults = llama_cpp.llama_cpp.llama_model_default_params

            def without_repacking():
                parameters = defaults()
                parameters.use_extra_bufts = False
                return parameters

            llama_cpp.llama_cpp.llama_model_default_params = without_repacking
        threads = torch.get_num_threads()
        model = llama_cpp.Llama(
            str(gguf_path()),
            n_ctx=LLAMA_CPP_CONTEXT,
            n_batch=LLAMA_CPP_CONTEXT,
            n_ubatch=LLAMA_CPP_CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            flash_attn=True,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_GUESSES) if lookup else None,
            verbose=False,
        )

        def answer(prompt: list[int], new_tokens: int) -> Answer:
            if len(prompt) + new_tokens > LLAMA_CPP_CONTEXT:
                raise ValueError(f"{len(prompt)} + {new_tokens} tokens do not fit llama.cpp's {LLAMA_CPP_CONTEXT}")
            model.reset()  # or it would keep the prompt's cache from the last time
            start = time.perf_counter()
            tokens = model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
            ids = [next(tokens)]
            first = time.perf_counter()
            ids += [next(tokens) for _ in range(new_tokens - 1)]
            return Answer((first - start) * 1e3, (time.perf_counter() - first) * 1e3, ids)

        return answer

    return build


def _kernel(draft: str = "", **options) -> Callable[[str | None], Answerer]:
    def build(profile: str | None) -> Answerer:
        if draft:
            return _stepper(speculation.build_kernel(profile, draft, **options))
        return _stepper(speculation.load_kernel(profile, **options)[0])

    return build


def _fast(weights: str, **options) -> Callable[[str | None], Answerer]:
    return lambda profile: _stepper(speculation.load_fast(profile, weights, **options)[0])


LLAMA_CPP_CONTEXT = 512
LOOKUP_GUESSES = 5  # as many as ours
EXTRA = "run `make peers`, or `pip install -e '.[peers]'`"
TORCHAO = dict(package="torchao", remedy=EXTRA)
LLAMA_CPP = dict(package="llama_cpp", remedy=EXTRA, default_only=True)
PLAIN = dict(ours=True, draft="plain")
CONDITIONED = dict(ours=True, draft="conditioned", default_only=True)
KERNEL = dict(ours=True, kernel=True)
CONTENDERS: list[Contender] = [
    Contender("hf-fp32", "transformers generate, FP32", _hf(torch.float32)),
    Contender("hf-bf16", "transformers generate, BF16", _hf(torch.bfloat16)),
    Contender("hf-compiled", "transformers generate, BF16, static cache, compiled", _hf_compiled),
    Contender("hf-assisted-fp32", "transformers assisted, FP32", _hf_assisted(torch.float32), draft="plain"),
    Contender("hf-assisted", "transformers assisted, BF16", _hf_assisted(torch.bfloat16), draft="plain"),
    Contender("torchao-int8", "torchao INT8 in transformers", _torchao(8), **TORCHAO),
    Contender("torchao-int4", "torchao INT4 in transformers", _torchao(4), **TORCHAO),
    Contender("torchao-int8-compiled", "torchao INT8, compiled", _torchao(8, True), **TORCHAO),
    Contender("torchao-int4-compiled", "torchao INT4, compiled", _torchao(4, True), **TORCHAO),
    Contender("llama-cpp", "llama.cpp, same GGUF", _llama_cpp(), **LLAMA_CPP),
    Contender("llama-cpp-plain", "llama.cpp, same GGUF, not repacked", _llama_cpp(repack=False), **LLAMA_CPP),
    Contender("llama-cpp-lookup", "llama.cpp, same GGUF, prompt lookup", _llama_cpp(lookup=True), **LLAMA_CPP),
    Contender("fast-fp32", "FastDecoder FP32", _fast("float32"), ours=True),
    Contender("fast-bf16", "FastDecoder BF16", _fast("bfloat16"), ours=True),
    Contender("fast-int8", "FastDecoder INT8", _fast("int8"), ours=True),
    Contender("fast-int4", "FastDecoder INT4, head INT8", _fast("int4"), ours=True),
    Contender("fast-int4-all", "FastDecoder INT4, head too", _fast("int4", head="int4"), ours=True),
    Contender("fast-int8-dynamic", "FastDecoder INT8 x INT8", _fast("int8_dynamic"), ours=True),
    Contender("speculative-plain", "FastDecoder BF16, plain draft", _speculative("bfloat16", "plain"), **PLAIN),
    Contender(
        "speculative", "FastDecoder BF16, conditioned draft", _speculative("bfloat16", "conditioned"), **CONDITIONED
    ),
    Contender(
        "speculative-int8",
        "FastDecoder INT8 x INT8, conditioned draft",
        _speculative("int8_dynamic", "conditioned"),
        **CONDITIONED,
    ),
    Contender("kernel", "KernelDecoder INT4, head INT8", _kernel(), **KERNEL),
    Contender("kernel-int8", "KernelDecoder INT4, head INT8, INT8 activations", _kernel(activations="int8"), **KERNEL),
    Contender("kernel-lookup", "KernelDecoder INT4, head INT8, prompt lookup", _kernel("lookup"), **KERNEL),
    Contender(
        "kernel-conditioned",
        "KernelDecoder INT4, head INT8, conditioned draft",
        _kernel("conditioned"),
        **KERNEL | CONDITIONED,
    ),
]


def guesses(name: str) -> bool:
    """Whether the contender of that name has a draft: such a one races against its like, for what a draft gains is
    another matter than how soon a decoder reads its weights. By the name, which old records have, too."""
    return any(word in name for word in ("assisted", "speculative", "lookup", "conditioned"))


def contender(name: str) -> Contender:
    """The contender of that name. Raises ValueError that lists the known ones."""
    for entry in CONTENDERS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown contender {name!r}; expected one of {', '.join(c.name for c in CONTENDERS)}")
