"""What a learner's own model folder must hold; what is wrong with it is said in one sentence that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

# Method: packages that transformers wants for it. Both papers round with data: arXiv 2210.17323 and 2306.00978.
PACKAGES = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel", "accelerate")}


def check_config(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError unless the folder has a readable config.json."""
    _check_json(folder / "config.json")


def check_weights(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError unless all weights are there, as whole safetensors files.

    Pickled weights are not read: a pickle can run code.
    """
    names = {WEIGHTS}
    if (folder / INDEX).exists():
        names = set(_check_json(folder / INDEX).get("weight_map", {}).values())
    for name in sorted(names):
        path = _check_file(folder / name)
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is cut or damaged ({error}); fetch it again") from error


def check_tokenizer(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError unless the folder has a tokenizer whose files can be read."""
    found = [folder / name for name in (*TOKENIZERS, "tokenizer_config.json") if (folder / name).exists()]
    if not any(path.name in TOKENIZERS for path in found):
        raise FileNotFoundError(f"{folder} has no tokenizer; expected {' or '.join(TOKENIZERS)} beside the weights")
    for path in found:
        _check_json(path) if path.suffix == ".json" else _check_file(path)


def check_keys(place: Path | str, loaded: Mapping[str, Iterable[Any]]) -> None:
    """Raise ValueError for weights that lack a tensor or have one of another name or shape.

    loaded: what `from_pretrained(..., output_loading_info=True)` tells. It fills a missing tensor with random numbers,
    and a model with one random matrix still answers, only badly.
    """
    faults = {"lack": "missing_keys", "hold, unknown to the model,": "unexpected_keys", "misshape": "mismatched_keys"}
    said = []
    for verb, kind in faults.items():
        names = sorted(str(key if isinstance(key, str) else key[0]) for key in loaded[kind])
        if names:
            said.append(f"{verb} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    if said:
        raise ValueError(f"the weights in {place} do not fit config.json: they {'; they '.join(said)}")


def _check_file(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected a folder as transformers' save_pretrained writes it")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in {path.parent}")
    return path


def _check_json(path: Path) -> Any:
    content = _check_file(path).read_bytes()
    try:
        return json.loads(content)
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} is cut or damaged ({error}); fetch it again") from error


# -- quantised before it was saved (GPTQ, AWQ): transformers loads it, if it can here ---------------------------------


def quantisation_of(config: PretrainedConfig) -> str | None:
    """The quantisation method that a model's config names, in lower case, or None."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method)).lower()


def check_quantisation(config: PretrainedConfig, device: torch.device) -> None:
    """Raise ValueError, naming method and remedy, for a quantised checkpoint that cannot be loaded on this device.

    The kernels come from another package, and without a GPU they cannot run.
    """
    method = quantisation_of(config)
    if method is None:
        return
    if method not in PACKAGES:
        raise ValueError(
            f"the checkpoint is quantised by {method!r}; expected {' or '.join(PACKAGES)}, or plain weights "
            "(the course quantises those itself: notebook 08)"
        )
    if device.type != "cuda":
        raise ValueError(f"the checkpoint is quantised by {method!r}, whose kernels need a CUDA device; got {device}")
    missing = [package for package in PACKAGES[method] if find_spec(package) is None]
    if missing:
        raise ValueError(f"a checkpoint quantised by {method!r} needs `pip install {' '.join(missing)}`")
