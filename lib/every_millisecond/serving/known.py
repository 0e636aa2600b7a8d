"""Servers that others maintain, as commands: on 127.0.0.1, from files of this machine, without the network.

with known(llama_cpp(gguf, threads=2, slots=4), folder / "log") as url:
    ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from every_millisecond.openmp import WAITING
from every_millisecond.serving.client import check_url
from every_millisecond.serving.servers import serving
from llm_latency.arguments import check_count

VARIABLE = "LLM_LATENCY_SERVER"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # the second: of the command line's own version

# A thread that waits spins for a moment and then sleeps, as everywhere in the course: see `every_millisecond.openmp`.

# llama.cpp's own C++ server, out of the xllamacpp wheel: it answers HTTP for as long as the object lives.
LLAMA_CPP = """\
import sys, threading, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.model_alias = sys.argv[1], {sys.argv[2]}
settings.port, settings.cpuparams.n_threads, settings.n_parallel, settings.n_ctx = map(int, sys.argv[3:])
server = xllamacpp.Server(settings)
threading.Event().wait()
"""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server. words: "{port}" in them stands for the port. health: answers 200 when it is ready.
    variables: of its environment, besides this process's own. limit_s: within which it must be ready."""

    words: tuple[str, ...]
    health: str = "/health"
    variables: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 120.0


def known(command: Command, log: Path) -> AbstractContextManager[str]:
    """The server for as long as a block runs; yields its address. Its output goes to `log`. Errors as `serving`."""
    environment = os.environ | command.variables
    return serving(command.words, log, health=command.health, limit_s=command.limit_s, environment=environment)


def llama_cpp(gguf: Path, threads: int, slots: int, *, context: int = 1024) -> Command:
    """llama.cpp's server on a GGUF file, which it offers as a model of the file's name.

    slots: requests that share its passes; the others wait. context: tokens that each slot has room for.
    Raises FileNotFoundError if there is no such file, ValueError for counts below 1.
    """
    for name, count in (("threads", threads), ("slots", slots), ("context", context)):
        check_count(name, count)
    if not Path(gguf).is_file():
        raise FileNotFoundError(f"{gguf}: no such GGUF file")
    numbers = ("{port}", str(threads), str(slots), str(slots * context))
    return Command((sys.executable, "-c", LLAMA_CPP, str(gguf), Path(gguf).name, *numbers), variables=WAITING)


def transformers_serve(folder: Path, *, dtype: str = "float32", threads: int | None = None) -> Command:
    """`transformers serve` on a model's directory (safetensors and tokenizer), loaded before it answers. It offers that
    one model, under the directory's path, and answers one request at a time. threads: None leaves them to torch.

    Raises FileNotFoundError if the folder holds no config.json, ValueError for threads below 1.
    """
    _check_folder(folder)
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(check_count("threads", threads))}
    options = ("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype)
    words = (sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), *options)
    return Command(words, variables=OFFLINE | limit)


def vllm(folder: Path, *, dtype: str = "auto") -> Command:
    """vLLM's server on a model's directory. Raises RuntimeError where it is not installed or there is no CUDA device,
    FileNotFoundError as `transformers_serve`."""
    if (reason := vllm_unavailable()) is not None:
        raise RuntimeError(reason)
    _check_folder(folder)
    options = ("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--gpu-memory-utilization", "0.5")
    words = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options)
    return Command(words, variables=OFFLINE, limit_s=600.0)


def vllm_unavailable() -> str | None:
    """Why vLLM cannot be started here, or None."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    import torch

    return None if torch.cuda.is_available() else "vLLM is installed, and there is no CUDA device"


def given() -> str | None:
    """The address of the reader's own server, if the environment names one. Raises ValueError if it is no address."""
    address = os.environ.get(VARIABLE, "").strip()
    if not address:
        return None
    try:
        return check_url(address)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def _check_folder(folder: Path) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; expected a model's directory")
