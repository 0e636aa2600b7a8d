"""Continuing a run that was interrupted, if nothing that matters has changed since."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.resources import files as package_files
from pathlib import Path

from filelock import FileLock, Timeout

from every_millisecond.ladder.record import REPORT
from llm_latency import files, hardware, models

SETTINGS = "settings.json"
LIVE = ".live"  # the lock of whoever measures in a folder, and beside it who that is


def fingerprint(profile: str, options: dict) -> dict:
    """What two parts of one run must share: model, machine, versions, the library's own code, and options."""
    return {
        "profile": profile,
        "weights": _weights(profile),
        "machine": hardware.machine_facts(),
        "code": _code(),
        "options": json.loads(json.dumps(options)),  # as it reads back
    }


def stored(folder: Path) -> dict:
    """The fingerprint of the run that was begun in `folder`."""
    return files.read_json(folder / SETTINGS, default={})


def _weights(profile: str) -> list:
    folder = Path(profile)
    if not folder.is_dir():
        return [models.choose_profile(profile)[0].target.revision]
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found]


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(str(package_files("llm_latency"))).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """What differs between two fingerprints, as "machine.torch: '2.12' was, '2.13' is"."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif key in ("weights", "code"):
            found.append({"weights": "the model's files", "code": "the library's code"}[key])
        else:
            found.append(f"{prefix}{key}: {before!r} was, {after!r} is")
    return found


def take(folder: Path, wanted: dict) -> bool:
    """Make `folder` this run's: True if it holds a part of the same run, False if it is new.

    Raises ValueError that says what differs if it holds another run.
    """
    if not stored(folder):
        files.write_atomically(folder / SETTINGS, json.dumps(wanted, indent=1))
        return False
    changed = differences(stored(folder), wanted)
    if changed:
        raise ValueError(f"{folder} holds another run ({'; '.join(changed)}); choose another folder")
    return True


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Measure in `folder` alone. Raises ValueError that names a live run there; a dead one holds nothing."""
    about = folder / f"{LIVE}.json"
    lock = FileLock(folder / f"{LIVE}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        run = files.read_json(about, default={})
        raise ValueError(
            f"process {run.get('process', '?')} has measured in {run.get('folder', folder)} since "
            f"{run.get('since', 'just now')}; wait for it, end it, or choose another folder"
        ) from None
    try:
        since = datetime.datetime.now().isoformat(" ", "seconds")
        files.write_atomically(about, json.dumps({"process": os.getpid(), "folder": str(folder), "since": since}))
        yield
    finally:
        about.unlink(missing_ok=True)
        lock.release()


def unfinished(out: Path) -> Path | None:
    """The newest run under `out` that was begun and has no report yet, or None."""
    begun = [path.parent for path in out.glob(f"*/{SETTINGS}") if not (path.parent / REPORT).exists()]
    return max(begun, default=None, key=lambda folder: folder.name)


def finished_parts(folder: Path) -> int:
    """How many processes of an interrupted run have left their measurements in `folder`."""
    return len([path for path in folder.glob("*.json") if path.name.rsplit(".", 2)[-2].isdigit()])
