"""The notebooks' kernels in the tests: two that start at once do not meet at one port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = Path(__file__).resolve().parent / "offline"
PROGRAM = """
from jupyter_client.manager import AsyncKernelManager, KernelManager
for kind in (KernelManager, AsyncKernelManager):
    first, second = kind(kernel_name="python3"), kind(kernel_name="python3")
    assert first.transport == second.transport == "ipc" and first.ip != second.ip, (first.ip, second.ip)
    assert len(first.ip) < 70  # a socket's path has 104 characters at most on macOS
    assert kind(ip="127.0.0.1").transport == "tcp"  # who asks for ports has them
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sockets that are files")
def test_kernels_of_the_tests_use_files(tmp_path):
    """A kernel that another test's took the port of died at its start, and all cells of its notebook failed."""
    environment = os.environ | {"PYTHONPATH": str(OFFLINE), "TMPDIR": "/tmp"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=120)
