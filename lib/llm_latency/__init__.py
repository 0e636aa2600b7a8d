"""Clocks that tell the truth, and FlashAttention, an INT8 KV cache and fast decoders for transformers models."""

import sys
from importlib.abc import MetaPathFinder


class _MovedFinder(MetaPathFinder):
    """Asked last, for modules that nobody found; `from room import name` asks for a module of that name, too."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("llm_latency."):
            from llm_latency._moved import MOVED  # here, for an import that succeeds has no use for it

            if name in MOVED:
                raise ImportError(f"{name} is now {MOVED[name]}, in the package that runs the course", name=name)


sys.meta_path.append(_MovedFinder())
