"""Kill a program at its k-th file operation, then start it again: python killed.py PROGRAM FOLDER OPERATIONS...

PROGRAM is a module beside this file with `main(folder)`. Each run is a fork of this process, so that what it imports is
imported once. What counts as an operation: every file opened for writing, every rename, removal, link and new folder.
One that opens a file is killed with the file open, what it held gone and nothing written yet; any other, before.
The first line printed is how many a whole run makes; then comes a line for each run that was killed and begun again.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import traceback
from itertools import pairwise
from pathlib import Path

COUNTED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}


def start(program, folder: Path, moment: int = 0, sent: int = signal.SIGKILL) -> tuple[int, str, int]:
    """Run `program.main(folder)` in a fork that kills itself at its moment-th operation, or never if that is 0.

    Returns its wait status, what it said of an error, and how many operations it made.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints is not the test's
        seen = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
            if writes or event in COUNTED:
                seen += 1
                if seen == moment:
                    if writes and not isinstance(arguments[0], int):
                        os.open(arguments[0], os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if "w" in arguments[1] else 0))
                    os.kill(os.getpid(), sent)

        error = ""
        sys.addaudithook(watch)
        try:
            program.main(folder)
        except BaseException:
            error = traceback.format_exc()
        os.write(writing, f"{seen}\n{error[-3000:]}".encode())
        os._exit(1 if error else 0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answers:
        said = answers.read()
    _, status = os.waitpid(child, 0)
    operations, _, error = said.partition("\n")
    return status, error, int(operations or 0)


def main() -> int:
    name, folder, moments = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).parent))
    program = importlib.import_module(name)
    whole = folder / "whole"
    whole.mkdir()
    status, error, operations = start(program, whole)
    if status:
        print(f"not killed at all:\n{error}")
        return 1
    print(operations)
    moments, draw = min(moments, operations), random.Random(name)
    ends = [operations * part // moments for part in range(moments + 1)]
    for number, (begin, end) in enumerate(pairwise(ends)):  # one of each part, so that no step is left out
        moment = draw.randint(begin + 1, end)
        place = folder / f"at-{moment}"
        place.mkdir()
        sent = signal.SIGTERM if number % 3 == 0 else signal.SIGKILL
        killed, _, _ = start(program, place, moment, sent)
        again, error, _ = start(program, place)
        print(f"operation {moment}: {'lived on' if killed == 0 else 'killed'}, then {error or 'well'}")
        if killed == 0 or again:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
