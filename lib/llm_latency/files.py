"""The cache folder, and writing to it so that nothing half-written ever stands there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where the course keeps models and measured ceilings: LLM_LATENCY_CACHE, else the user's cache directory.

    Raises RuntimeError that says what to do if the folder cannot be made.
    """
    chosen = os.environ.get("LLM_LATENCY_CACHE")
    if chosen:
        folder = Path(chosen).expanduser()
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "llm_latency"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "llm_latency"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm_latency"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"cannot make the cache folder {folder} ({error.strerror}); "
            "set LLM_LATENCY_CACHE to a folder you may write to"
        ) from error
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path, default: Any) -> Any:
    """The content of a JSON file, or `default` if it is not there. Raises ValueError naming a file that is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return default
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run again") from error
