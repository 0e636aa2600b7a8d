"""Writes the counted table of GPU memory into docs/gpu.md, between its two marks.

python tools/count_memory.py            # write
python tools/count_memory.py 08 qwen2.5-7b   # what lies on the card at one notebook's fullest moment
"""

from __future__ import annotations

import sys
from pathlib import Path

from every_millisecond import gpu_memory
from llm_latency import files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- counted by tools/count_memory.py -->", "<!-- end of the counted table -->"


def with_table(text: str) -> str:
    """The page with the table that is counted now. Raises ValueError if the marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{gpu_memory.table()}\n{END}{after}"


def main(arguments: list[str]) -> None:
    if arguments:
        book = gpu_memory.count(*arguments)
        print(f"{book.nbytes / 1e9:.1f} GB in cell {book.cell}:")
        for part, nbytes in sorted(book.fullest.items(), key=lambda item: -item[1]):
            print(f"{nbytes / 1e9:8.2f} GB  {part}")
        return
    files.write_atomically(PAGE, with_table(PAGE.read_text(encoding="utf-8")))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
