"""A decode step as one CUDA graph: recorded once per shape, replayed with one launch afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WARMUP_CALLS = 3  # compilation and lazily made workspaces must be over before a graph is recorded


@dataclass(slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    positions: Tensor
    logits: Tensor
    features: Tensor


class GraphedStep:
    """Calls `run(ids, positions, span, masked, last_only)`, which gives (logits, features), by replaying a recording.

    The results of a replay stand in the same memory each time: copies are returned, so that those of two steps can be
    kept side by side. Weights and KV cache must stay where they are while recordings are in use.
    """

    def __init__(self, run: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
        self.run, self.device = run, device
        self.recordings: dict[tuple[int, int, bool, bool], _Recording] = {}

    def __call__(
        self, ids: Tensor, positions: Tensor, span: int, masked: bool, last_only: bool
    ) -> tuple[Tensor, Tensor]:
        key = (ids.shape[0], span, masked, last_only)
        recording = self.recordings.get(key)
        if recording is None:
            recording = self.recordings[key] = self._record(ids, positions, span, masked, last_only)
        recording.ids.copy_(ids)
        recording.positions.copy_(positions)
        recording.graph.replay()
        return recording.logits.clone(), recording.features.clone()

    def _record(self, ids: Tensor, positions: Tensor, *shape) -> _Recording:
        # Recording writes the KV slots of these very positions with these very tokens, so running it thrice harms
        # nothing: each run writes the same values.
        ids, positions = ids.clone(), positions.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP_CALLS):
                self.run(ids, positions, *shape)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, features = self.run(ids, positions, *shape)
        return _Recording(graph, ids, positions, logits, features)
