"""The state of the pretend device: what was issued, what the host has waited for, what is captured, what is held."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from pretend_gpu.card import Card

BLOCK = 512  # bytes: CUDA's allocator rounds every request up to this
MS_PER_LAUNCH = 1e-3  # what events say: a count of launches, and nothing about speed


class Block:
    """The device memory of one storage: counted while any tensor that looks into it is alive."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.gpu, self.nbytes = gpu, -(-nbytes // BLOCK) * BLOCK
        self.captured = gpu.capture  # the graph in whose capture it was made
        gpu.allocated += self.nbytes
        if gpu.allocated > gpu.card.total_memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB; {gpu.card.name} has "
                f"{gpu.card.total_memory / 2**30:.2f} GiB, and with this {gpu.allocated / 2**30:.2f} GiB are taken"
            )
        gpu.peak = max(gpu.peak, gpu.allocated)

    def __del__(self) -> None:
        self.gpu.allocated -= self.nbytes


class Gpu:
    """One pretend device.

    syncs: the reason of every wait of the host, in order. launches: operators issued, views not counted. replays: of
    graphs. allocated, peak: bytes of live storages, rounded as CUDA's allocator rounds them.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.device = torch.device("cuda", 0)
        self.syncs: list[str] = []
        self.launches = 0
        self.replays = 0
        self.allocated = self.peak = 0
        self.capture: Graph | None = None
        self.landing = "host"  # where a tensor goes that the operator under way creates out of nothing
        self.filling = False  # x[...] = number is under way
        self.aside = False  # work of the pretend device itself, which its rules do not concern
        self.streams: list[Stream] = []
        self.default_stream: Stream | None = None
        self.stream: Stream | None = None  # the current one
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()

    def block(self, storage: torch.UntypedStorage) -> Block:
        """The memory that stands for a storage, counted once however many tensors look into it."""
        found = self._blocks.get(storage._cdata)
        if found is None:
            found = self._blocks[storage._cdata] = Block(self, storage.nbytes())
        return found

    def sync(self, reason: str, stream: Stream | None = None) -> None:
        """The host waits for everything issued to the stream (None: the current one). Refused during capture."""
        self.refuse_in_capture(reason)
        self.syncs.append(reason)
        (stream or self.stream).finish()

    def sync_all(self, reason: str) -> None:
        """The host waits for the whole device."""
        self.sync(reason)
        for stream in self.streams:
            stream.finish()

    def refuse_in_capture(self, what: str) -> None:
        """Raise as CUDA does for what a graph cannot hold."""
        if self.capture is not None:
            self.capture.broken = what
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def launch(self) -> None:
        """Count one operator, issued to the current stream."""
        self.launches += 1
        self.stream.issued += 1

    @contextlib.contextmanager
    def standing_aside(self) -> Iterator[None]:
        """No rules and no counting: the pretend device computes something for itself."""
        before, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = before


class Stream:
    """Work in order of issue. `done`: how much of it the host has waited for."""

    gpu: Gpu  # set by `pretend`, here and below

    def __init__(self, device=None, priority: int = 0) -> None:
        self.device, self.priority = self.gpu.device, priority
        self.issued = self.done = 0
        self.after: list[tuple[Stream, int]] = []  # another stream's work that must be over before the next of this
        self.cuda_stream = len(self.gpu.streams)
        self.gpu.streams.append(self)

    def finish(self, upto: int | None = None) -> None:
        """The host has waited for this stream, and so for what it waited for."""
        self.done = max(self.done, self.issued if upto is None else upto)
        after, self.after = self.after, []
        for stream, stamp in after:
            stream.finish(stamp)

    def synchronize(self) -> None:
        self.gpu.sync("Stream.synchronize", self)

    def query(self) -> bool:
        return self.done >= self.issued

    def wait_stream(self, other: Stream) -> None:
        self.after.append((other, other.issued))

    def wait_event(self, event: Event) -> None:
        if event.stamp is not None:
            self.after.append((event.stream, event.stamp))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before, self.gpu.stream = self.gpu.stream, self
        return self

    def __exit__(self, *_) -> None:
        self.gpu.stream = self._before


class Event:
    """A mark in a stream. Its time is the number of launches on the device before it."""

    gpu: Gpu

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_) -> None:
        self.enable_timing = enable_timing
        self.stream: Stream | None = None
        self.stamp: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.stream
        self.stream.issued += 1
        self.gpu.launches += 1
        self.stamp, self.time = self.stream.issued, self.gpu.launches

    def query(self) -> bool:
        return self.stamp is None or self.stream.done >= self.stamp

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.refuse_in_capture("Event.synchronize")
        self.gpu.syncs.append("Event.synchronize")
        if self.stamp is not None:
            self.stream.finish(self.stamp)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Raises RuntimeError for events without timing, not recorded, or not waited for."""
        for event in (self, end):
            if not event.enable_timing:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if event.stamp is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready: nothing has waited for the event")
        return (end.time - self.time) * MS_PER_LAUNCH


class Graph:
    """A CUDAGraph: the operators of a capture, run again at each replay on the same memory.

    As on a GPU, a capture computes nothing: what was written in place is put back at its end, what was made in it is
    filled with NaN.
    """

    gpu: Gpu

    def __init__(self, keep_graph: bool = False) -> None:
        self.reset()

    def reset(self) -> None:
        self.operators: list[Callable[[], None]] = []
        self.reads: dict[int, weakref.ref[Block]] = {}  # memory from before the capture
        self.made: list[torch.Tensor] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.broken: str | None = None
        self.complete = False

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def capture_begin(self, pool=None, capture_error_mode: str = "global") -> None:
        if self.gpu.stream is self.gpu.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.gpu.capture = self

    def capture_end(self) -> None:
        self.gpu.capture = None
        if self.broken:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {self.broken}")
        for storage, values in self.before.values():
            storage.copy_(values)
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self.before, self.complete = {}, True

    def uses(self, block: Block) -> None:
        """An operator of the capture reads or writes this memory."""
        if block.captured is not self:
            self.reads[id(block)] = weakref.ref(block)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """An operator of the capture is about to write here: remember what stands there."""
        if storage._cdata not in self.before:
            self.before[storage._cdata] = (storage, storage.clone())

    def replay(self) -> None:
        if not self.complete:
            raise RuntimeError("replay() of a graph without a finished capture")
        self.gpu.refuse_in_capture("CUDAGraph.replay")
        if any(block() is None for block in self.reads.values()):
            raise RuntimeError(
                "the graph works on memory that was freed since its capture: on a GPU, an illegal access"
            )
        self.gpu.launch()
        self.gpu.replays += 1
        with self.gpu.standing_aside():
            for operator in self.operators:
                operator()


class GraphCapture:
    """torch.cuda.graph: captures what is issued inside into a graph, on a stream of its own."""

    gpu: Gpu

    def __init__(self, cuda_graph: Graph, pool=None, stream: Stream | None = None, capture_error_mode="global") -> None:
        self.graph, self.stream = cuda_graph, stream or Stream()

    def __enter__(self) -> None:
        self.gpu.sync_all("torch.cuda.graph")
        self.stream.__enter__()
        self.graph.capture_begin()

    def __exit__(self, kind, error, trace) -> None:
        self.stream.__exit__()
        if kind is None:
            self.graph.capture_end()
        else:
            self.gpu.capture = None
