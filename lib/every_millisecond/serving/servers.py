"""A server on this machine for as long as a block runs: a free port, a health check, its output kept, always ended.

Always: also when this process is killed (a notebook's kernel is, at times) and can clean up nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from every_millisecond.processes import printable

ENDING_S = 10.0


class ServerFailed(RuntimeError):
    """Why a server did not come up, with the last lines that it printed."""


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    *,
    port: int | None = None,
    health: str = "/health",
    limit_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Start a server and yield its address once it answers; end it, and all it started, when the block ends.

    command: its words; "{port}" in them stands for the port. log: where its output goes. health: a path that answers
    200 when the server is ready. environment: the server's; None: this process's own.

    Raises ServerFailed with its last words if it ends, does not answer within `limit_s`, or its port is taken;
    FileNotFoundError if there is no such program.
    """
    port = free_port() if port is None else port
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ServerFailed(f"port {port} is taken by another program; leave port out to get a free one")
    words = [word.replace("{port}", str(port)) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=None if environment is None else dict(environment),
        )  # fmt: skip
        try:
            with _leash(process):
                _wait(process, f"http://127.0.0.1:{port}", health, limit_s, words[0], log)
                yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


@contextlib.contextmanager
def _leash(process: subprocess.Popen) -> Iterator[None]:
    """While the block runs, a shell waits at a pipe that only this process holds: it closes when we end, however we do,
    and then the shell kills the server's process group."""
    if os.name != "posix":
        yield
        return
    script = f"read _; kill -s KILL -- -{process.pid}"
    quiet = subprocess.DEVNULL
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        shell.kill()
        shell.wait()
        shell.stdin.close()


def _wait(process: subprocess.Popen, url: str, health: str, limit_s: float, name: str, log: Path) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"{name} ended with code {process.returncode}: {_last_words(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(url + health, timeout=2).status == 200:
                return
        time.sleep(0.2)
    raise ServerFailed(f"{name} did not answer {health} within {limit_s:g} s: {_last_words(log)}")


def _last_words(log: Path, lines: int = 5) -> str:
    said = printable(log.read_text(encoding="utf-8", errors="replace")).strip().splitlines()
    return " | ".join(said[-lines:]) or "it printed nothing"


def _end(process: subprocess.Popen) -> None:
    """Ask it to end, then make it; its whole process group, for servers start workers."""

    def tell(number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(process.pid, number)
            else:
                process.terminate()

    tell(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=ENDING_S)
    tell(getattr(signal, "SIGKILL", signal.SIGTERM))
    process.kill()
    process.wait()
