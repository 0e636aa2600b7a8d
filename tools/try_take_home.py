"""Build the take-home package alone, install it in an empty environment, and run the README's examples from there.

    python tools/try_take_home.py                 # a tiny random model stands for the reader's own
    python tools/try_take_home.py --folder DIR    # or a model that you have

The environment gets PyTorch and transformers, as any program's that would use the package, and nothing of the course.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def examples() -> str:
    """The Python of the README's section "Take a piece home", one program for a variable `folder`."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("### Take a piece home", 1)[1].split("\n## ", 1)[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


def make_model(folder: Path) -> None:
    """A tiny random Llama with the course's tokenizer, as a reader's own model lies on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from llm_latency import models

    config = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config |= dict(vocab_size=49152, num_key_value_heads=2, max_position_embeddings=1024)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    models.load_tokenizer("smollm2-135m").save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a model of your own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        folder = args.folder or place / "model"
        if not args.folder:
            make_model(folder)
        wheels = place / "wheels"
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels)]
        subprocess.run([*build, str(ROOT / "lib")], check=True)
        wheel = next(wheels.glob("*.whl"))
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        venv.create(place / "empty", with_pip=True)
        python = place / "empty" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        locked = ["-c", str(ROOT / "requirements.lock")]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *locked, str(wheel)], check=True)
        listed = subprocess.run([str(python), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True)
        names = sorted(line.split("==")[0] for line in listed.stdout.split())
        print(f"{len(names)} packages: {', '.join(names)}")
        program = place / "examples.py"
        program.write_text(f"folder = {str(folder)!r}\n{examples()}", encoding="utf-8")
        return subprocess.run([str(python), str(program)], cwd=place).returncode


if __name__ == "__main__":
    sys.exit(main())
