"""Triton's kernels on the pretend device, by Triton's own interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from unittest import mock

from torch import Tensor

from pretend_gpu.gpu import Gpu
from pretend_gpu.tensors import DeviceTensor


@contextlib.contextmanager
def launch_interpreted(gpu: Gpu) -> Iterator[None]:
    """Triton's kernels take device tensors, which the interpreter reads as the held ones."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def launch(self, *args, **kwargs) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(isinstance(x, DeviceTensor) for x in given):
            return call(self, *args, **kwargs)
        for x in given:
            if not isinstance(x, DeviceTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        def run() -> None:
            values = [x.held if isinstance(x, DeviceTensor) else x for x in args]
            named = {name: x.held if isinstance(x, DeviceTensor) else x for name, x in kwargs.items()}
            call(self, *values, **named)

        if gpu.capture is not None:
            for x in given:
                gpu.capture.uses(x.block)
                gpu.capture.keep(x.held.untyped_storage())
            gpu.capture.operators.append(run)
        gpu.launch()
        with gpu.standing_aside():
            run()

    with mock.patch.object(GridExecutor, "__call__", launch):
        yield
