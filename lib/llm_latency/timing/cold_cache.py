"""Empty a device's cache between repeats, so that work finds its data in memory, not where the last repeat left it."""

from __future__ import annotations

from pathlib import Path

import torch

_CACHE_FOLDERS = Path("/sys/devices/system/cpu/cpu0/cache")
_FALLBACK_BYTES = 64 * 2**20  # larger than the last-level cache of most laptops
_LARGEST_BUFFER = 2**30


def last_level_cache_bytes(device: torch.device) -> int | None:
    """Bytes of the cache nearest to memory: L2 on a GPU, the last level on a CPU. None where the system does not tell.

    The CPU's are read from Linux; a virtual machine is often told of the whole server's cache.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for size_file in _CACHE_FOLDERS.glob("index*/size"):
        text = size_file.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes, default=None)


class CacheFlusher:
    """Passes over a buffer twice the size of the cache; `flush` leaves nothing else in it.

    Args:
        device: a CPU or CUDA device.

    The buffer stops at 1 GiB: on a server with a larger cache the flush is partial, and `nbytes` tells.
    """

    def __init__(self, device: torch.device) -> None:
        cache = last_level_cache_bytes(device) or _FALLBACK_BYTES
        self.nbytes = min(2 * cache, _LARGEST_BUFFER)
        self.partial = self.nbytes < 2 * cache
        self._buffer = torch.zeros(self.nbytes // 4, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Evict everything. The caller synchronises."""
        # Read and write: a plain fill may bypass a CPU's cache (non-temporal stores) and evict nothing.
        self._buffer.add_(1)
