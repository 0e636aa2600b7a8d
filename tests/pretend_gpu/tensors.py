"""Tensors that lie on the pretend device, and the rules that every operator on them is held to."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_gpu.gpu import Gpu
from pretend_gpu.kernels import CUDA_ONLY

CPU = torch.device("cpu")
# Operators whose result's shape or value the host must know before it can go on.
WAITS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "multinomial", "repeat_interleave",
}  # fmt: skip
TAKES_A_CPU_SCALAR = {"masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}  # fmt: skip


def _widened(func):
    """A product of 16-bit matrices with many rows: summed in FP32 as on a GPU, which a CPU without BF16 does faster."""

    def product(*values: Tensor, **named) -> Tensor:
        half = values[0].dtype
        if half not in (torch.bfloat16, torch.float16) or values[-2].shape[-2] < 8:
            return func(*values, **named)
        return func(*(x.float() for x in values), **named).to(half)

    return product


WIDENED = {func: _widened(func) for func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
                                              torch.ops.aten.bmm.default)}  # fmt: skip


class DeviceTensor(Tensor):
    """A tensor on the pretend device: `held` is the CPU tensor with its values, `block` the memory it stands for."""

    gpu: Gpu
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cpu",  # a real CUDA device would make torch ask for CUDA itself
        )
        self.held = held
        self.block = cls.gpu.block(held.untyped_storage())
        return self

    device = property(lambda self: self.gpu.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # the function mode sees every call already

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return operate(cls.gpu, func, args, kwargs or {})


class Operators(TorchDispatchMode):
    """Sees every operator, those on host tensors too."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return operate(self.gpu, func, args, kwargs or {})


def tensors_in(x) -> list[Tensor]:
    """Every tensor of an operator's arguments or results, in order. (torch's pytree takes longer than the operator.)"""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    return [tensor for part in x for tensor in tensors_in(part)]


def change(f, x):
    """x with every tensor in it put through f."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(change(f, part) for part in x)
    if isinstance(x, dict):
        return {name: change(f, part) for name, part in x.items()}
    return x


@functools.cache
def _writes(func) -> tuple[bool, ...]:
    """Which arguments of an operator it writes to."""
    return tuple(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def upload(gpu: Gpu, value: Tensor, *, waits: bool = True, reason: str = "copy from the host") -> DeviceTensor:
    """A device copy of a host tensor. A copy from pageable memory waits for the stream unless it is non-blocking."""
    gpu.refuse_in_capture(reason)
    with gpu.standing_aside():
        there = DeviceTensor(value.detach().clone())
    gpu.launch()
    if waits:
        gpu.sync(reason)
    return there


def download(gpu: Gpu, value: DeviceTensor, *, waits: bool = True, reason: str = "copy to the host") -> Tensor:
    """A host copy of a device tensor. The host waits, unless the copy is non-blocking."""
    gpu.refuse_in_capture(reason)
    gpu.launch()
    if waits:
        gpu.sync(reason)
    with gpu.standing_aside():
        return value.held.clone()


def operate(gpu: Gpu, func, args: tuple, kwargs: dict):
    """Run one operator by the rules: on the values if all its tensors are on the device, or as it is if none is."""
    if gpu.aside:
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    tensors = tensors_in((args, kwargs))
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":  # from code that torch's own Python calls
        kwargs = kwargs | {"device": CPU}
    to_gpu = device is not None and device.type == "cuda"
    if not ours:
        if tensors and to_gpu:
            return upload(gpu, func(*args, **kwargs))
        if not tensors and (to_gpu or gpu.landing == "gpu"):
            return _run(gpu, func, args, kwargs, tensors)
        if gpu.capture is not None and name not in ("lift_fresh", "detach"):
            gpu.refuse_in_capture(f"{name} on host tensors")
        return func(*args, **kwargs)
    if name in ("copy_", "_copy_from") and len(ours) < len(tensors):
        return _copy_between(gpu, *args[:3])
    if name in INDEXING and isinstance(args[0], DeviceTensor):  # indices may lie on the host, and are copied
        places = [upload(gpu, i) if isinstance(i, Tensor) and not isinstance(i, DeviceTensor) else i for i in args[1]]
        by_mask = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in places)
        number = len(args) > 2 and not isinstance(args[2], DeviceTensor) and args[2].dim() == 0  # then a masked_fill
        if by_mask and not number:
            gpu.sync(f"{name} by a mask")
        args = (args[0], places, *args[2:])
        tensors = tensors_in((args, kwargs))
    others = [x for x in tensors if not isinstance(x, DeviceTensor)]
    scalars = torch.Tag.pointwise in func.tags or name in TAKES_A_CPU_SCALAR or name in INDEXING
    if any(x.dim() > 0 or not scalars for x in others):
        _mixed(func, tensors)
    if name in WAITS and kwargs.get("output_size") is None:
        gpu.sync(name)
    if gpu.landing == "host" and name in LIKE and device is not None:  # x.new_zeros(..., device="cpu")
        with gpu.standing_aside():
            return func(*change(_held, args), **kwargs)
    return _run(gpu, func, args, kwargs, tensors)


def _held(x):
    return x.held if isinstance(x, DeviceTensor) else x


def _mixed(func, tensors: list[Tensor]) -> None:
    places = ", ".join(f"{x.device} {list(x.shape)}" for x in tensors)
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"({func._schema.name}: {places})"
    )


def _copy_between(gpu: Gpu, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`to.copy_(source)` from one device to the other. The host waits, unless the copy is non-blocking."""
    if gpu.filling and source.dim() == 0:  # x[0] = 1.0: the number travels with the launch
        return operate(gpu, torch.ops.aten.fill_.Tensor, (to, source), {})
    reason = "copy_ between host and device"
    gpu.refuse_in_capture(reason)
    if not non_blocking:
        gpu.sync(reason)
    gpu.launch()
    with gpu.standing_aside():
        _held(to).copy_(_held(source))
    return to


def _run(gpu: Gpu, func, args: tuple, kwargs: dict, tensors: list[Tensor]):
    """Run an operator on the held values; wrap what it makes; write it down if a graph is captured."""
    known = {id(_held(x)): x for x in tensors}
    values, named = change(_held, args), change(_held, kwargs)
    capture = gpu.capture
    kernel = CUDA_ONLY.get(func._schema.name.removeprefix("aten::"))
    compute = functools.partial(kernel, gpu.card) if kernel else WIDENED.get(func, func)
    with gpu.standing_aside():
        if capture is not None:
            for x in tensors:
                if isinstance(x, DeviceTensor):
                    capture.uses(x.block)
            for argument, writes in zip(values, _writes(func), strict=False):
                if writes and isinstance(argument, Tensor):
                    capture.keep(argument.untyped_storage())
        result = compute(*values, **named)
        made = [x for x in tensors_in(result) if id(x) not in known]
        if capture is not None and not func.is_view:
            _write_down(capture, compute, values, named, made)

        def wrap(x: Tensor) -> Tensor:
            return known[id(x)] if id(x) in known else DeviceTensor(x)

        wrapped = change(wrap, result)
    for x in tensors:
        if isinstance(x, DeviceTensor) and x.held.shape != x.shape:
            raise NotImplementedError(f"{func} changes a shape in place, which the pretend device cannot follow")
    if not func.is_view:
        gpu.launch()
    return wrapped


def _write_down(capture, compute, values: tuple, named: dict, made: list[Tensor]) -> None:
    """Add to a graph an operator that puts its results where the capture's stand."""
    capture.made.extend(made)

    def again() -> None:
        fresh = tensors_in(compute(*values, **named))
        places = [x for x in fresh if not any(x is y for y in tensors_in((values, named)))]
        for place, x in zip(made, places, strict=True):
            place.copy_(x)

    capture.operators.append(again)
