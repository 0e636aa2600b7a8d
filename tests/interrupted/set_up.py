"""`make setup`: the Makefile and tools/set_up.py themselves, with a stand-in for Python, pip and the download.

The stand-in asks before each of its steps, over a socket; it is answered by an operation of this process. Where no
answer comes any more, this process was killed, and the stand-in kills its group: make, the shell and itself.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import os, runpy, signal, socket, subprocess, sys
from pathlib import Path

asked = socket.socket(fileno=int(os.environ["ASKED"]))

def step(name):
    try:
        asked.send(b"?")
        answer = asked.recv(1)
    except OSError:
        answer = b""
    if not answer:
        os.killpg(0, signal.SIGKILL)
    path = Path(".venv", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Path("python").read_bytes())
    path.chmod(0o755)

def run(command, cwd):
    module = command[2]  # pip, or every_millisecond.cli for the download
    works = Path(".venv/bin/pip").exists()  # else: No module named pip
    if works:
        step(f"{module} begun")
        step(f"{module} done")
    return subprocess.CompletedProcess(command, 0 if works else 1)

if sys.argv[1:3] == ["-m", "venv"]:
    for name in ("pyvenv.cfg", "bin/python", "bin/pip", "bin/activate"):  # the order of Python's own
        step(name)
else:
    subprocess.run = run
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
SCRATCH = tempfile.TemporaryDirectory()
FRESH = Path(SCRATCH.name) / "course"
(FRESH / "tools").mkdir(parents=True)
for name in ("Makefile", "pyproject.toml", "requirements.lock", "tools/set_up.py"):
    shutil.copy(ROOT / name, FRESH / name)
(FRESH / "stand_in.py").write_text(STAND_IN)
(FRESH / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS stand_in.py "$@"\n')
(FRESH / "python").chmod(0o755)


def make(course: Path) -> None:
    ours, its = socket.socketpair()
    command = ["make", "setup", "PYTHON=./python", "VENV=.venv", "TORCH_INDEX="]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    environment["ASKED"] = str(its.fileno())
    with subprocess.Popen(command, cwd=course, env=environment, pass_fds=[its.fileno()], start_new_session=True) as run:
        its.close()
        while ours.recv(1):
            (course / "steps").open("a").close()
            ours.send(b"!")
    assert run.returncode == 0, run.returncode


def main(folder: Path) -> None:
    course = folder / "course"
    if not course.exists():
        subprocess.run(["cp", "-r", FRESH, course], check=True)
    make(course)
    for name in ("bin/pip", "pip done", "every_millisecond.cli done", ".ready"):
        assert (course / ".venv" / name).exists(), f"{name} is missing"
