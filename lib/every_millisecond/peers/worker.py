"""One contender in a process of its own: `python -m every_millisecond.peers.worker NAME PROFILE`. Started by `race`.

Between its turns it waits for input and so leaves the cores to the others.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from every_millisecond.peers.contenders import contender
from every_millisecond.processes import Parent


def main() -> None:
    parent = Parent()
    name, profile = sys.argv[1], sys.argv[2] or None
    answer = contender(name).build(profile)
    parent.answer({"ready": True})
    for request in parent.requests():
        parent.answer(asdict(answer(request["prompt"], request["new_tokens"])))


if __name__ == "__main__":
    main()
