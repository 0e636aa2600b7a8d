"""How large the house is, and how long a token's way through it: `python tools/house_report.py [--checkout PATH]`.

Lines and files of both packages, what importing a decoder loads, and the functions and files of llm_latency that one
token passes, counted while a small random model decodes. Another checkout is measured by this one's rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import house  # noqa: E402  (tests/house.py)

LIMITS = {"llm_latency.engine.fast_decoder": 20, "llm_latency.speculative.decoder": 30}
PROMPT_TOKENS, GAMMA = 12, 4


def size(lib: Path, package: str) -> tuple[int, int]:
    """Files and lines of a package's Python and C++ sources."""
    suffixes = (".py", ".cpp", ".h")
    paths = [path for path in (lib / package).rglob("*") if path.suffix in suffixes]
    return len(paths), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def passed(work: Callable[[], object], folder: Path, *, inside: str | None = None) -> tuple[list[str], list[str]]:
    """The functions and the files of `folder` that `work` runs through; while one named `inside` runs, if given."""
    prefix, functions, files, depth = str(folder), set(), set(), 0

    def notice(frame, event: str, _) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(prefix) or event not in ("call", "return"):
            return
        entered = 1 if event == "call" else -1
        if code.co_name == inside:
            depth += entered
        if event == "call" and (inside is None or depth > 0) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(prefix).lstrip("/")
            functions.add(f"{file}: {getattr(code, 'co_qualname', code.co_name)}")
            files.add(file)

    sys.setprofile(notice)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(functions), sorted(files)


def ways(lib: Path) -> dict[str, tuple[list[str], list[str]]]:
    """What one token, one cycle and the whole request around them pass, in the fast decoder and the speculative one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llm_latency.engine import FastDecoder
    from llm_latency.generation import generate
    from llm_latency.speculative import ModelDraft, SpeculativeDecoder

    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256)).eval()
    ids = torch.arange(3, 3 + PROMPT_TOKENS)[None]
    decoder = FastDecoder.from_model(model)
    speculative = SpeculativeDecoder(decoder, ModelDraft(FastDecoder.from_model(model)), GAMMA)

    def plain_request() -> None:
        generate(decoder, ids, GAMMA)

    def speculative_request() -> None:
        speculative.generate(ids, GAMMA + 3)

    plain_request()
    speculative_request()
    folder = lib / house.TAKE_HOME
    return {
        "a token in FastDecoder.step": passed(plain_request, folder, inside="step"),
        "a request through generate and FastDecoder": passed(plain_request, folder),
        "a cycle of SpeculativeDecoder": passed(speculative_request, folder, inside="cycle"),
        "a request through SpeculativeDecoder": passed(speculative_request, folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout to measure")
    parser.add_argument("--names", action="store_true", help="print each module and function, too")
    args = parser.parse_args()
    lib = args.checkout.resolve() / "lib"
    sys.path.insert(0, str(lib))
    for package in (house.TAKE_HOME, house.COURSE):
        if (lib / package).is_dir():
            files, lines = size(lib, package)
            print(f"{package:<20}{lines:>8,} lines in {files} files")
    for module, limit in LIMITS.items():
        loaded = house.closure(module, lib)
        print(f"{module} loads {len(loaded)} modules of {house.TAKE_HOME} (limit {limit})")
        print("".join(f"    {name}\n" for name in loaded) if args.names else "", end="")
    for name, (functions, files) in ways(lib).items():
        print(f"{name} passes {len(functions)} functions in {len(files)} files")
        print("".join(f"    {function}\n" for function in functions) if args.names else "", end="")


if __name__ == "__main__":
    main()
