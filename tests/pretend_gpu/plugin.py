"""Gives every test marked `cuda` a GPU: this machine's where there is one, else the pretend one."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from pretend_gpu import Gpu, pretend

CARD = "A100-80GB"


def _forget_answers() -> None:
    """Clear what the course has asked of the machine and kept: with the device, the answers change."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("llm_latency", "every_millisecond"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@pytest.fixture(autouse=True)
def gpu(request) -> Iterator[Gpu | None]:
    """The pretend device's counters in a test marked `cuda` on a machine without CUDA; else None.

    A mark `pretend_card(name)` chooses the card, a mark `silicon(reason)` asks for a real GPU.
    """
    if request.node.get_closest_marker("cuda") is None:
        yield None
        return
    properties = request.node.user_properties
    if torch.cuda.is_available():
        properties.append(("gpu", torch.cuda.get_device_name()))
        yield None
        return
    silicon = request.node.get_closest_marker("silicon")
    if silicon is not None:
        properties.append(("needs a real GPU", silicon.args[0]))
        pytest.skip(f"needs a real GPU: {silicon.args[0]}")
    card = request.node.get_closest_marker("pretend_card")
    name = card.args[0] if card else CARD
    if not request.module.__name__.startswith("test_pretend_gpu"):  # its own tests are not the course's
        properties.append(("gpu", f"the pretend {name}"))
    _forget_answers()
    try:
        with pretend(name) as device:
            yield device
    finally:
        _forget_answers()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> str:
    """ "cpu", and "cuda": the real device or the pretend one."""
    return request.param


def summary(terminalreporter) -> None:
    """Say how many CUDA tests ran on what, and how many did not run and why."""
    ran, skipped = Counter(), Counter()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if outcome == "skipped" and "needs a real GPU" in properties:
                skipped[f"needs a real GPU: {properties['needs a real GPU']}"] += 1
            elif outcome == "skipped" and "gpu" in properties:
                skipped[str(report.longrepr[-1]).removeprefix("Skipped: ")] += 1
            elif outcome in ("passed", "failed") and report.when == "call" and "gpu" in properties:
                ran[properties["gpu"]] += 1
    if not ran and not skipped:
        return
    terminalreporter.section("CUDA tests")
    for name, count in sorted(ran.items()):
        terminalreporter.write_line(f"{count} ran on {name}")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
