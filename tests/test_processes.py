"""The harness that the ladder and the peers stand on: what a worker may do, and what is made of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from every_millisecond import processes
from every_millisecond.processes import Worker, WorkerFailed, ended_by_sigterm, printable

SCRIPTS = {
    "echo": "for request in parent.requests():\n    parent.answer({'heard': request, 'pid': os.getpid()})",
    "dies": "print('first line', file=sys.stderr)\nraise ValueError('no such thing: \\x1b[31m42')",
    "silent": "sys.exit(3)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "late": "time.sleep(600)",
    "chatter": "print('hello from a library')\nos.write(1, b'\\xff\\xfe more')\nparent.answer({'ready': True})",
    "no_answer": "os.write(parent._answers.fileno(), b'\\xff\\xfehello\\n')\ntime.sleep(600)",
    "bytes": "os.write(2, b'\\xff\\xfe broke \\x00 here\\n')\nos._exit(1)",
    "children": (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "parent.answer({'child': child.pid})\ntime.sleep(600)"
    ),
    "busy": "parent.answer({'pid': os.getpid()})\nwhile True:\n    pass",
}
HEAD = """import os, signal, subprocess, sys, time
sys.path.insert(0, {lib!r})
from every_millisecond.processes import Parent
parent = Parent()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts one of SCRIPTS as a worker, from a folder with a blank in its name."""
    folder = tmp_path / "with a blank"
    folder.mkdir()
    lib = str(Path(processes.__file__).parents[1])
    for name, text in SCRIPTS.items():
        (folder / f"script_{name}.py").write_text(HEAD.format(lib=lib) + text)
    monkeypatch.chdir(folder)
    return lambda name: Worker(f"script_{name}", [])


def gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked for its exit code yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def wait_until_gone(pid: int) -> None:
    while not gone(pid):
        time.sleep(0.01)  # the test's own time limit ends a wait that never does


def test_questions_and_answers(start):
    """Guards against answers that belong to another question, and a worker that does not end by itself."""
    with start("echo") as worker:
        assert [worker.ask(n, 60)["heard"] for n in (1, [2], {"three": "drei \u2713"})] == [
            1,
            [2],
            {"three": "drei \u2713"},
        ]
        assert worker.close() == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dies", r"^ValueError: no such thing: \\x1b\[31m42$"),
        ("silent", "^the process ended with code 3 and no message$"),
        ("killed", "^the process was ended by SIGKILL$"),
        ("no_answer", r"^the process wrote .*xff.*hello.* where an answer belongs$"),
        ("bytes", r"^\\xff\\xfe broke \\x00 here$"),
    ],
)
def test_what_ends_a_worker_is_said(start, name, reason):
    """Kind 45: undecodable bytes, a signal, an exit without a word: each is a reason in one printable sentence."""
    with pytest.raises(WorkerFailed, match=reason), start(name) as worker:
        worker.read(60)


def test_what_libraries_print_is_no_answer(start):
    """Kind 45: a banner on standard output, undecodable at that, was taken for an answer."""
    with start("chatter") as worker:
        assert worker.read(60) == {"ready": True}


def test_a_worker_that_takes_too_long_is_ended(start):
    """Kind 45: without a limit one worker holds up all others."""
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"), start("late") as worker:
        worker.read(0.2)


@pytest.mark.parametrize("how", ["limit", "error", "end"])
def test_its_children_end_with_it(start, how):
    """Kind 45: the compiler processes of a killed worker went on for minutes on the cores of the next one."""
    worker = start("children")
    child = worker.read(60)["child"]
    if how == "limit":
        with pytest.raises(WorkerFailed):
            worker.read(0.05)
    elif how == "error":
        with pytest.raises(KeyboardInterrupt), worker:
            raise KeyboardInterrupt
    else:
        worker.close()
    wait_until_gone(child)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(start, number):
    """Kind 44: SIGTERM ends the workers at once; after SIGKILL, which nobody can answer, they notice by themselves."""
    code = HEAD.replace("parent = Parent()", "").format(lib=str(Path(processes.__file__).parents[1]))
    code += "from every_millisecond.processes import Worker, ended_by_sigterm\n"
    code += "with ended_by_sigterm(), Worker('script_busy', []) as worker:\n"
    code += "    print(worker.read(60)['pid'], flush=True)\n    worker.read(600)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(number)
    assert parent.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_until_gone(worker)


def test_sigterm_is_as_before_afterwards():
    """Guards against a notebook's kernel that can no longer be ended by its server."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before


def test_printable():
    """Kind 46: what HTML and terminals cannot carry is escaped; what they can stays."""
    text = "a\tb\nc\x00\x07\x1b[0m\x7f\x85\ud800 \u00a0\u2713"
    assert printable(text) == "a\tb\nc\\x00\\x07\\x1b[0m\\x7f\\x85\\ud800 \u00a0\u2713"
    assert json.loads(json.dumps(printable(text))) == printable(text)
