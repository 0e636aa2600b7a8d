"""What happens above the operators: where device arguments, conversions and generators are read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pretend_gpu.gpu import Gpu
from pretend_gpu.tensors import CPU, DeviceTensor, change, download, tensors_in, upload


class _AnyGenerator(type(torch._C.Generator)):
    def __instancecheck__(cls, thing) -> bool:
        return isinstance(thing, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """torch.Generator, on the pretend device too. Its numbers are the CPU's."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, device="cpu")
        self.place = as_device(device)
        return self

    def __init__(self, device="cpu") -> None:
        pass

    device = property(lambda self: self.place)


def as_device(device) -> torch.device:
    """A device as torch reports it: "cuda" is cuda:0. Raises RuntimeError for a second GPU."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index not in (None, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {device}; the pretend machine has one GPU")
    return torch.device("cuda", 0) if device.type == "cuda" else device


class Functions(TorchFunctionMode):
    """Sees every call of torch's Python functions and methods."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, dict(kwargs or {})
        if gpu.aside or func in GETTERS:
            return func(*args, **kwargs)
        if func in SPECIAL:
            return SPECIAL[func](gpu, func, args, kwargs)
        device = None if kwargs.get("device") is None else as_device(kwargs["device"])
        there = (
            any(isinstance(x, DeviceTensor) for x in tensors_in((args, kwargs)))
            if device is None
            else device.type == "cuda"
        )
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        for generator in (*args, *kwargs.values()):
            if isinstance(generator, torch._C.Generator) and generator.device.type != ("cuda" if there else "cpu"):
                raise RuntimeError(
                    f"Expected a '{'cuda' if there else 'cpu'}' device type for generator but found "
                    f"'{generator.device.type}'"
                )
        before, gpu.landing = gpu.landing, "gpu" if there else "host"
        gpu.filling = func is Tensor.__setitem__ and not isinstance(args[2], Tensor)
        try:
            return func(*args, **kwargs)
        finally:
            gpu.landing, gpu.filling = before, False


GETTERS = {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "ndim", "grad", "requires_grad", "is_cuda", "layout", "is_leaf", "nbytes")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.element_size}


def _to(gpu: Gpu, func, args: tuple, kwargs: dict) -> Tensor:
    """Tensor.to, cuda and cpu: between devices a copy, on one device torch's own conversion."""
    x, rest, kwargs = args[0], args[1:], dict(kwargs)
    copy = kwargs.pop("copy", False)
    if func is Tensor.cuda:
        device, dtype, waits = gpu.device, None, not kwargs.get("non_blocking", False)
        as_device((rest[0] if rest else kwargs.get("device")) or "cuda")
    elif func is Tensor.cpu:
        device, dtype, waits = CPU, None, True
    elif (rest and isinstance(rest[0], Tensor)) or "other" in kwargs:
        other = rest[0] if rest else kwargs["other"]
        device, dtype, waits = other.device, other.dtype, True
    else:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **kwargs)
        device, waits = None if device is None else as_device(device), not non_blocking
    device, dtype = device or x.device, dtype or x.dtype
    layout = {name: kwargs[name] for name in ("memory_format",) if kwargs.get(name) is not None}
    if device == x.device:
        return Tensor.to(x, dtype, copy=copy, **layout)
    if device.type not in ("cuda", "cpu"):
        return Tensor.to(x.held if isinstance(x, DeviceTensor) else x, device, dtype)
    with gpu.standing_aside():
        source = (x.held if isinstance(x, DeviceTensor) else x).detach().to(dtype, **layout)
    if device.type == "cuda":
        moved = upload(gpu, source, waits=waits and not x.__dict__.get("pinned", False))
    else:
        there = DeviceTensor(source) if source is not x.held else x
        moved = download(gpu, there, waits=waits)
    return moved.requires_grad_() if x.requires_grad and torch.is_grad_enabled() else moved


def _tensor(gpu: Gpu, func, args: tuple, kwargs: dict) -> Tensor:
    """torch.tensor, as_tensor, asarray and new_tensor: host data, which a device argument copies to the device."""
    device = kwargs.pop("device", None)
    first = args[0]
    if isinstance(first, DeviceTensor):
        device = device or first.device
        if func is Tensor.new_tensor:
            func, args = torch.tensor, args[1:]
            kwargs.setdefault("dtype", first.dtype)
        elif func is torch.tensor:
            return _to(gpu, Tensor.to, (first, device), {"copy": True, **kwargs})
        else:
            return _to(gpu, Tensor.to, (first, device), kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    data = args[0]
    if isinstance(data, (list, tuple)) and any(isinstance(x, DeviceTensor) for x in tensors_in(data)):
        gpu.sync(f"{func.__name__} of device tensors")  # one wait for each, at the least
        with gpu.standing_aside():
            args = (change(lambda x: x.held.item() if isinstance(x, DeviceTensor) else x, data),)
    there = device is not None and as_device(device).type == "cuda"
    if not there:
        gpu.refuse_in_capture(f"{func.__name__} on the host")
        return func(*args, **kwargs, device=device).requires_grad_(requires_grad)
    gpu.refuse_in_capture(f"{func.__name__}: copy from the host")
    with gpu.standing_aside():
        value = func(*args, **kwargs)
    return upload(gpu, value, reason=f"{func.__name__}: copy from the host").requires_grad_(requires_grad)


def _numpy(gpu: Gpu, func, args: tuple, kwargs: dict):
    if isinstance(args[0], DeviceTensor):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return func(*args, **kwargs)


def _tolist(gpu: Gpu, func, args: tuple, kwargs: dict):
    x = args[0]
    if isinstance(x, DeviceTensor):
        x = download(gpu, x, reason="tolist")
    with gpu.standing_aside():
        return x.tolist()


def _text(gpu: Gpu, func, args: tuple, kwargs: dict) -> str:
    x = args[0]
    if not isinstance(x, DeviceTensor):
        return func(*args, **kwargs)
    gpu.sync("repr")
    with gpu.standing_aside():
        return f"{func(x.held, *args[1:], **kwargs)[:-1]}, device='cuda:0')"


def _format(gpu: Gpu, func, args: tuple, kwargs: dict) -> str:
    if isinstance(args[0], DeviceTensor):
        gpu.sync("format")
    return _held_only(gpu, func, args, kwargs)


def _held_only(gpu: Gpu, func, args: tuple, kwargs: dict):
    """Questions about memory: the held tensor answers."""
    with gpu.standing_aside():
        return func(args[0].held if isinstance(args[0], DeviceTensor) else args[0], *args[1:], **kwargs)


def _pin(gpu: Gpu, func, args: tuple, kwargs: dict) -> Tensor:
    if isinstance(args[0], DeviceTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")
    pinned = args[0].clone()
    pinned.pinned = True
    return pinned


def _deepcopy(gpu: Gpu, func, args: tuple, kwargs: dict) -> Tensor:
    x, memo = args
    if not isinstance(x, DeviceTensor):
        return func(*args, **kwargs)
    if id(x) not in memo:
        gpu.launch()
        with gpu.standing_aside():
            copied = DeviceTensor(x.held.clone())
        memo[id(x)] = copied.requires_grad_(x.requires_grad)
        if getattr(x, "_is_param", False):
            copied._is_param = True
    return memo[id(x)]


def _reduce(gpu: Gpu, func, args: tuple, kwargs: dict):
    x = args[0]
    if not isinstance(x, DeviceTensor):
        return func(*args, **kwargs)
    with gpu.standing_aside():
        return _rebuild, (x.held.clone(), x.requires_grad, getattr(x, "_is_param", False))


def _rebuild(held: Tensor, requires_grad: bool, is_parameter: bool) -> DeviceTensor:
    x = upload(DeviceTensor.gpu, held).requires_grad_(requires_grad)
    if is_parameter:
        x._is_param = True
    return x


def _set_data(gpu: Gpu, func, args: tuple, kwargs: dict) -> None:
    x, value = args
    if isinstance(x, DeviceTensor) != isinstance(value, DeviceTensor):
        raise RuntimeError("x.data = y across devices: the pretend device cannot change what a tensor is")
    func(*args)
    if isinstance(x, DeviceTensor):
        x.held, x.block = value.held, value.block


def _attention(gpu: Gpu, func, args: tuple, kwargs: dict) -> Tensor:
    """SDPA, with what CUDA's fused kernels take and the CPU's do not mind."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, mask = given["query"], given.get("attn_mask")
    if isinstance(query, DeviceTensor):
        parts = [x for x in (query, given["key"], given["value"], mask) if x is not None]
        if not all(isinstance(x, DeviceTensor) for x in parts):
            raise RuntimeError(f"Expected all tensors to be on the same device (scaled_dot_product_attention): "
                               f"{', '.join(str(x.device) for x in parts)}")  # fmt: skip
        flags = torch.backends.cuda
        half = query.dtype in (torch.float16, torch.bfloat16)
        fits = half and mask is None and gpu.card.major >= 8 and query.shape[-1] <= 256
        fused = (flags.flash_sdp_enabled() and fits) or flags.mem_efficient_sdp_enabled()
        if not (fused or flags.math_sdp_enabled() or (flags.cudnn_sdp_enabled() and half and gpu.card.major >= 8)):
            raise RuntimeError("No available kernel. Aborting execution.")
    before, gpu.landing = gpu.landing, "gpu" if isinstance(query, DeviceTensor) else "host"
    try:
        return func(*args, **kwargs)
    finally:
        gpu.landing = before


SPECIAL = {
    **dict.fromkeys((Tensor.to, Tensor.cuda, Tensor.cpu), _to),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor), _tensor),
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), _numpy),
    **dict.fromkeys((Tensor.data_ptr, Tensor.untyped_storage, Tensor.is_shared), _held_only),
    **dict.fromkeys((Tensor.__reduce_ex__,), _reduce),
    Tensor.tolist: _tolist,
    Tensor.__repr__: _text,
    Tensor.__format__: _format,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: lambda gpu, func, args, kwargs: args[0].__dict__.get("pinned", False),
    Tensor.get_device: lambda gpu, func, args, kwargs: 0 if isinstance(args[0], DeviceTensor) else -1,
    Tensor.record_stream: lambda gpu, func, args, kwargs: None,
    Tensor.__deepcopy__: _deepcopy,
    Tensor.data.__set__: _set_data,
    F.scaled_dot_product_attention: _attention,
}
