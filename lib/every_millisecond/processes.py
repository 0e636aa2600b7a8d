"""Worker processes: started afresh, answering in JSON lines, each within a limit, and ended with all they started.

A worker is a module of ours, run with `python -m`. Its standard output belongs to its answers; what libraries print
goes to its standard error, whose last line says why a worker ended. It ends when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from every_millisecond.openmp import process_environment

LAST_WORDS = 1 << 16  # bytes of a worker's standard error that are read for its last line
ENDING_S = 20.0  # for a worker to end by itself


class WorkerFailed(RuntimeError):
    """Why a worker gave no answer, in one sentence."""


def printable(text: str) -> str:
    """The text with its control characters escaped, so that a terminal and HTML can carry it."""
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c
        for c in text
    )


class Worker:
    """One worker, in a process group of its own. As a context manager it is ended at once when the block ends early.

    Raises WorkerFailed with the reason if it dies, is killed, writes what is no answer, or takes over a limit; then it,
    and every process that it started, is ended.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._ended = False
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            errors="backslashreplace",
            env=process_environment(),
            start_new_session=True,
        )

    def ask(self, request: Any, limit_s: float) -> Any:
        """Send a request and read its answer."""
        with contextlib.suppress(BrokenPipeError):  # it died in between; reading tells why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self.read(limit_s)

    def read(self, limit_s: float) -> Any:
        """The next answer, which must come within `limit_s` seconds."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True  # a signal that comes before the `try` must not make the interpreter wait for it
        try:
            timer.start()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith("\n"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                self._kill()
                raise WorkerFailed(f"the process wrote {printable(line[:80])!r} where an answer belongs") from None
        if late.is_set():
            raise WorkerFailed(f"no answer within {limit_s:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=ENDING_S)  # its own code and signal are the reason, not ours
        self._kill()  # what it started may live on
        raise WorkerFailed(self._reason())

    def close(self) -> int:
        """Let it end by itself, as it does when nothing more can be asked; its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=ENDING_S)
        self._kill()
        self._process.stdout.close()
        self._errors.close()
        return self._process.returncode

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def _kill(self) -> None:
        """End it and its process group, which may outlive it; once, for its number may be given to another."""
        if self._ended:
            return
        self._ended = True
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _reason(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - LAST_WORDS))
        words = printable(self._errors.read().decode("utf-8", "backslashreplace")).strip().splitlines()
        return words[-1] if words else f"the process ended with code {code} and no message"


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM leaves it as Ctrl-C does, so that its workers end with this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Parent:
    """A worker's side: `answer` writes, `requests` yields what is asked. To be made before anything prints."""

    def __init__(self) -> None:
        # Libraries print what they like to standard output; the answers go through a copy that nobody else knows.
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def answer(self, answer: Any) -> None:
        print(json.dumps(answer), file=self._answers)

    def requests(self) -> Iterator[Any]:
        while True:
            yield json.loads(self._requests.get())

    def _listen(self) -> None:
        # Unbuffered: a thread that waits inside sys.stdin holds a lock which the interpreter wants as it ends.
        for line in open(0, "rb", buffering=0, closefd=False):
            self._requests.put(line.decode())
        os._exit(0)  # the parent is gone, or has nothing more to ask: whatever this process is at, it is for nobody
