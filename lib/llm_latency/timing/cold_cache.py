"""Empty a device's cache between repeats, so that work finds its data in memory, not where the last repeat left it."""

from __future__ import annotations

import torch

from llm_latency.host import last_level_cache_bytes

_LARGEST_BUFFER = 2**30


def cache_bytes(device: torch.device) -> int:
    """Bytes of the cache nearest to memory: L2 on a GPU, the last level on a CPU.

    A virtual machine is often told of the whole server's cache, of which it can use a part.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return last_level_cache_bytes()


class CacheFlusher:
    """Passes over a buffer twice the size of the cache; `flush` leaves nothing else in it.

    Args:
        device: a CPU or CUDA device.

    The buffer stops at 1 GiB: on a server with a larger cache the flush is partial, and `nbytes` tells.
    """

    def __init__(self, device: torch.device) -> None:
        cache = cache_bytes(device)
        self.nbytes = min(2 * cache, _LARGEST_BUFFER)
        self.partial = self.nbytes < 2 * cache
        self._buffer = torch.zeros(self.nbytes // 4, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Evict everything. The caller synchronises."""
        # Read and write: a plain fill may bypass a CPU's cache (non-temporal stores) and evict nothing.
        self._buffer.add_(1)
