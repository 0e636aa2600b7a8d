"""The cache folder and shared files: modes, locks, paths from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_latency import files, hardware

posix = pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_broken_cache_file_is_named(cache):
    """A half-written JSON must not look like an empty one."""
    for content in (b'[{"key"', b"\x89PNG\xff"):
        (cache / "ceilings.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"ceilings\.json is not valid JSON.*delete it"):
            hardware.ceilings("cpu")


def test_write_atomically_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """A crash between writing and renaming must leave the old content and no leftovers."""
    path = tmp_path / "x.json"
    files.write_atomically(path, "old")

    def crash(source, target):
        raise RuntimeError("power cut")

    monkeypatch.setattr(files.os, "replace", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# -- paths in environment variables (cases.md 37) ---------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["~/kept", "kept", "./kept"])
def test_a_path_means_the_same_from_every_folder(home, tmp_path, monkeypatch, chosen):
    """Fault (37): a folder called "~", or a cache that is empty again in the next notebook's folder."""
    monkeypatch.setenv("LLM_LATENCY_CACHE", chosen)
    found = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.add(files.cache_folder())
        assert list((tmp_path / name).iterdir()) == []
    assert found == {home / "kept"} and (home / "kept").is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is Linux's")
def test_the_default_is_the_users_cache(home, monkeypatch):
    """Fault: a set-up's model not found again because the default moved."""
    monkeypatch.delenv("LLM_LATENCY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder() == home / ".cache" / "llm_latency"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert files.cache_folder() == home / "elsewhere" / "llm_latency"
    monkeypatch.setenv("LLM_LATENCY_CACHE", "")  # set but empty is not set
    assert files.path_from_environment("LLM_LATENCY_CACHE") is None


def test_no_home_says_what_to_set(monkeypatch):
    """Fault (48): a service without HOME dies in pathlib."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("LLM_LATENCY_CACHE", "kept")
    monkeypatch.setattr(files.Path, "home", homeless)
    with pytest.raises(RuntimeError, match="set LLM_LATENCY_CACHE"):
        files.cache_folder()


# -- files that several users and processes share (cases.md 36) -------------------------------------------------------


@posix
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask(tmp_path, umask, mode):
    """Fault (36): a temporary file's 0600 makes what one user stored unreadable to every other."""
    before = os.umask(umask)
    try:
        files.write_atomically(tmp_path / "shared.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "shared.json").stat().st_mode & 0o777 == mode


def test_a_file_that_cannot_be_read_counts_as_absent_but_is_never_replaced(tmp_path, monkeypatch):
    """Fault (36): another user's file ends a notebook; or is taken for empty, and then written over."""
    path = tmp_path / "scorecard.json"
    path.write_text('{"kept": 1}')

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:  # root may read everything, so the refusal is simulated
        patched.setattr(files.Path, "read_bytes", refuse)
        assert files.read_json(path, default={}) == {}
        with pytest.raises(PermissionError):
            files.update_json(path, lambda content: {**content, "new": 2}, default={})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert files.read_json(tmp_path / "missing.json", default=7) == 7


def test_two_processes_that_write_one_file_lose_nothing(tmp_path):
    """Fault (36): both read, both write, and the first one's entries are gone."""
    path = tmp_path / "scorecard.json"
    program = """
import pathlib, sys
from llm_latency import files
path, name = pathlib.Path(sys.argv[1]), sys.argv[2]
for i in range(40):
    files.update_json(path, lambda content: {**content, f"{name}{i}": i}, default={})
"""
    running = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "ab"]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert set(json.loads(path.read_text())) == {f"{name}{i}" for name in "ab" for i in range(40)}
    assert sorted(entry.name for entry in Path(tmp_path).iterdir()) == ["scorecard.json", "scorecard.json.lock"]
