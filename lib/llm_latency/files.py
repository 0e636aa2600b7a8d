"""The cache folder, and files that several processes and users share: nothing half-written, nothing lost."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LEFTOVER_S = 24 * 3600.0


def path_from_environment(variable: str) -> Path | None:
    """The path in an environment variable, or None if it is not set or empty.

    "~" is expanded, and a relative path lies below the home folder: it means the same from every working directory.
    """
    chosen = os.environ.get(variable)
    return Path.home() / Path(chosen).expanduser() if chosen else None


def cache_folder() -> Path:
    """Where models and measured ceilings are kept: LLM_LATENCY_CACHE, else the user's cache directory.

    Raises RuntimeError that says what to do if the folder cannot be made.
    """
    from platformdirs import user_cache_path  # here, for most programs never ask

    remedy = "set LLM_LATENCY_CACHE to a folder you may write to"
    try:
        chosen = path_from_environment("LLM_LATENCY_CACHE")
        folder = chosen or Path.home() / user_cache_path("llm_latency", appauthor=False, opinion=False)
    except RuntimeError as error:  # no home
        raise RuntimeError(f"no cache folder: {error}; {remedy}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"cannot make the cache folder {folder} ({error.strerror}); {remedy}") from error
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, sees the old content or the new, never a part.

    Its mode follows the umask, as that of any new file: others who share the folder can read it. What a process left
    behind that was killed while it wrote goes after a day.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _remove_leftovers(path: Path) -> None:
    """Remove unfinished files of the same name that nobody can still be writing. One from the future, after a clock was
    set back, stays until the clock has caught up."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError):  # another process removed it, or it is another user's
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink()


def read_json(path: Path, default: Any) -> Any:
    """The content of a JSON file, or `default` if it is not there or this user may not read it.

    Raises ValueError naming a file that is broken.
    """
    try:
        return _parse(path)
    except (FileNotFoundError, PermissionError):
        return default


def update_json(path: Path, change: Callable[[Any], Any], default: Any) -> Any:
    """Replace a JSON file's content by `change(content)`, and return that. `default` stands for a missing file.

    A lock is held meanwhile, so that of two processes that write neither loses what the other wrote. Raises ValueError
    for a broken file and OSError for one that cannot be read or written: what it holds is not thrown away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        try:
            content = _parse(path)
        except FileNotFoundError:
            content = default
        content = change(content)
        write_atomically(path, json.dumps(content, indent=1))
    return content


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder, waiting for whoever has it; the system releases it if its holder dies."""
    from filelock import FileLock

    with FileLock(f"{path}.lock"):
        yield


def _parse(path: Path) -> Any:
    text = path.read_bytes()
    try:
        return json.loads(text)
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run again") from error
