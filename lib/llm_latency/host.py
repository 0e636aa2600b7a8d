"""What the operating system lets this process have: cores, memory, the last-level cache. A container's limits count."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # tests put a tree of their own here


def cpu_name() -> str:
    """The processor's name as the system writes it."""
    try:
        for line in (ROOT / "proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use, at least 1: fewer than there are under an affinity mask or a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cpu_quota())))


def memory_bytes() -> int | None:
    """Main memory that this process may fill, in bytes: the machine's or, if less, its container's. None: unknown."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limits = [_numbers(folder / name) for folder in _control_groups("memory") for name in _MEMORY_FILES]
    return min([physical, *(int(limit[0]) for limit in limits if limit)])


def last_level_cache_bytes() -> int:
    """Size of the CPU's last-level cache as the kernel reports it; 32 MiB where it does not."""
    sizes = []
    for path in (ROOT / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * (1 << 10 if text[-1] == "K" else 1 << 20))
    return max(sizes, default=32 << 20)


# -- control groups, version 2 (one tree) and version 1 (a tree for each controller) ----------------------------------

_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")


def _cpu_quota() -> float:
    """CPU seconds per second that the tightest control group allows; infinity without a limit."""
    quotas = [math.inf]
    for folder in _control_groups("cpu"):
        limit = _numbers(folder / "cpu.max") or (
            _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        )
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:  # version 1 writes -1 for no limit
            quotas.append(limit[0] / limit[1])
    return min(quotas)


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may limit `controller`: its own, and every one above it.

    Inside a container the path that the kernel names may be the host's, which is not mounted; what is there counts.
    """
    mounts = ROOT / "sys/fs/cgroup"
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tree = mounts
        elif controller in controllers.split(","):
            tree = next((mounts / name for name in (controllers, controller) if (mounts / name).is_dir()), mounts)
        else:
            continue
        group = Path(path.lstrip("/"))
        yield from (tree / folder for folder in (group, *group.parents) if (tree / folder).is_dir())


def _numbers(path: Path) -> list[float]:
    """The numbers in a control file; none if it is not there or says "max"."""
    try:
        return [float(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
