"""Notebook kernels that speak through files in a folder of their own, not through TCP ports.

A TCP port is chosen by whoever starts a kernel, freed, and bound a second later by the kernel. Where two start at once,
both may choose the same one, and one ends with "Kernel died before replying to kernel_info", as `make test` has met.
sitecustomize.py beside this file imports it into every process of the tests.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path


@functools.cache
def folder() -> Path:
    """One a process, short: the path of a socket has a hundred characters at most."""
    made = tempfile.mkdtemp(prefix="em-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def use_files(manager: type) -> None:
    """Make this KernelManager's instances use files, unless they are told where to connect."""
    plain, numbers = manager.__init__, itertools.count()

    @functools.wraps(plain)
    def init(self, *args, **options):
        if not {"transport", "connection_file", "ip"} & set(options):
            options |= {"transport": "ipc", "connection_file": str(folder() / f"{os.getpid()}-{next(numbers)}.json")}
        plain(self, *args, **options)

    manager.__init__ = init


class Watcher(importlib.abc.MetaPathFinder):
    """Finds jupyter_client's manager where everybody does, and changes it once it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != "jupyter_client.manager":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            use_files(module.KernelManager)

        spec.loader.exec_module = exec_module
        return spec


if sys.platform != "win32":  # which has no such sockets
    sys.meta_path.insert(0, Watcher())
