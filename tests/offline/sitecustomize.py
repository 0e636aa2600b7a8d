"""Put on PYTHONPATH by `make test`: every Python process, notebook kernels included, refuses to leave this machine."""

import os
import socket

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_LOCAL = ("127.", "::1", "localhost")


def _check(sock, address):
    if sock.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOCAL):
        raise OSError(f"network use during tests: connection to {address!r} refused")


def _guarded_connect(self, address):
    _check(self, address)
    return _connect(self, address)


def _guarded_connect_ex(self, address):
    _check(self, address)
    return _connect_ex(self, address)


socket.socket.connect = _guarded_connect
socket.socket.connect_ex = _guarded_connect_ex

if os.environ.get("LLM_LATENCY_TEST_SAMPLES"):
    import few_samples  # noqa: F401  limits what a notebook measures

import kernel_sockets  # noqa: E402, F401  two kernels that start at once never meet at one port
