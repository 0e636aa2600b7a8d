"""One contender in a process of its own: `python -m every_millisecond.peers.worker NAME`. Started by `race`.

Reads one JSON line per request and writes one JSON line per answer. Between its turns it waits for input and so leaves
the cores to the others.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from every_millisecond.peers.contenders import contender


def main() -> None:
    # Libraries print what they like to standard output; the answers go through a copy of it that nobody else knows.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, profile = sys.argv[1], sys.argv[2] or None
    answer = contender(name).build(profile)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(asdict(answer(request["prompt"], request["new_tokens"]))), file=answers)


if __name__ == "__main__":
    main()
