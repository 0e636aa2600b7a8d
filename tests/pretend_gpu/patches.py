"""Puts the pretend device in the place of torch.cuda, and takes it away again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from pretend_gpu import gpu as state
from pretend_gpu.card import CARDS
from pretend_gpu.functions import Functions, Generator, as_device
from pretend_gpu.gpu import Gpu
from pretend_gpu.interpreter import launch_interpreted
from pretend_gpu.tensors import DeviceTensor, Operators


class _Nothing:
    """torch.cuda.device(...) and nvtx.range(...): with one device there is nothing to change."""

    def __init__(self, device=None, *_) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


def _cuda(gpu: Gpu) -> dict[str, object]:
    """What torch.cuda answers."""
    card = gpu.card

    def in_stream(stream):
        return stream or contextlib.nullcontext()

    def reset_peak(device=None) -> None:
        gpu.peak = gpu.allocated

    def statistics(device=None) -> dict[str, int]:
        return {"allocated_bytes.all.current": gpu.allocated, "allocated_bytes.all.peak": gpu.peak}

    def bf16(including_emulation: bool = True) -> bool:
        return card.bfloat16 or including_emulation

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)

    return {
        "Stream": state.Stream,
        "Event": state.Event,
        "CUDAGraph": state.Graph,
        "graph": state.GraphCapture,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: as_device(device) and None,
        "device": _Nothing,
        "device_of": _Nothing,
        "get_device_properties": lambda device=None: as_device(device or 0) and card,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_arch_list": lambda: [f"sm_{card.major}{card.minor}"],
        "is_bf16_supported": bf16,
        "synchronize": lambda device=None: gpu.sync_all("torch.cuda.synchronize"),
        "current_stream": lambda device=None: gpu.stream,
        "default_stream": lambda device=None: gpu.default_stream,
        "stream": in_stream,
        "is_current_stream_capturing": lambda: gpu.capture is not None,
        "graph_pool_handle": lambda: (0, 0),
        "memory_allocated": lambda device=None: gpu.allocated,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "memory_reserved": lambda device=None: gpu.allocated,
        "max_memory_reserved": lambda device=None: gpu.peak,
        "reset_peak_memory_stats": reset_peak,
        "memory_stats": statistics,
        "mem_get_info": lambda device=None: (card.total_memory - gpu.allocated, card.total_memory),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device=None: torch.default_generator.set_state(new_state),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
    }


def _apply_and_keep_ties(apply):
    """Module._apply replaces parameters here; two names of one parameter must go on naming one."""

    def patched(self: nn.Module, fn, recurse: bool = True) -> nn.Module:
        if not recurse:
            return apply(self, fn, recurse)
        tied: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                tied.setdefault(id(parameter), []).append((module, name))
        kept = [x for x in self.parameters()]  # alive, so that no id is used twice
        apply(self, fn, recurse)
        for (first, name), *others in tied.values():
            for module, other in others:
                if first._parameters[name] is not None:
                    module._parameters[other] = first._parameters[name]
        del kept
        return self

    return patched


@contextlib.contextmanager
def _no_inference_mode() -> Iterator[None]:
    """inference_mode as no_grad: inference tensors cannot be wrapped."""
    kind = torch.autograd.grad_mode.inference_mode

    def enter(self) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self, *_) -> None:
        torch.set_grad_enabled(self.before)

    with mock.patch.object(kind, "__enter__", enter), mock.patch.object(kind, "__exit__", leave):
        yield


def _on_the_host_alone(init):
    """The profiler without its CUDA half, which fails anew at every operator, and takes its time over saying so.

    What it tells of the device is zero.
    """

    def patched(self, *args, activities=None, **options) -> None:
        kept = [a for a in activities or () if a != torch.profiler.ProfilerActivity.CUDA]
        init(self, *args, activities=kept or None, **options)

    return patched


def _handed_back(model=None, **_):
    """torch.compile without compiling."""
    return (lambda function: function) if model is None else model


@contextlib.contextmanager
def pretend(card: str = "A100-80GB") -> Iterator[Gpu]:
    """Make this process believe in a GPU of `CARDS` while the context is open. Yields the `Gpu`, which counts.

    Tensors of the pretend device must not be used after the context. Raises KeyError for an unknown card, RuntimeError
    where there is a real GPU.
    """
    if card not in CARDS:
        raise KeyError(f"no pretend card {card!r}; known: {', '.join(CARDS)}")
    if torch.cuda.is_available():
        raise RuntimeError("a CUDA device is here already: use it")
    gpu = Gpu(CARDS[card])
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        # As triton_block does, and for good: a file of kernels that is read later, outside, would else be compiled.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        enter(mock.patch.multiple(torch.cuda, create=True, **_cuda(gpu)))
        enter(mock.patch.object(torch.version, "cuda", "12.8"))
        enter(mock.patch.object(torch, "Generator", Generator))
        enter(mock.patch.object(torch, "compile", _handed_back))
        enter(mock.patch.object(nn.Module, "_apply", _apply_and_keep_ties(nn.Module._apply)))
        recorder = torch.profiler.profile.__mro__[1]
        enter(mock.patch.object(recorder, "__init__", _on_the_host_alone(recorder.__init__)))
        for kind in (DeviceTensor, state.Stream, state.Event, state.Graph, state.GraphCapture):
            enter(mock.patch.object(kind, "gpu", gpu, create=True))
        gpu.default_stream = gpu.stream = state.Stream()
        enter(_no_inference_mode())
        enter(launch_interpreted(gpu))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        enter(Operators(gpu))
        enter(Functions(gpu))
        yield gpu
