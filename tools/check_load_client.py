"""How right is the load client? Against a server with known delays that notes its own moments on the same clock.

    python tools/check_load_client.py                 # 50 requests a second, then enough for 500 streams at once
    python tools/check_load_client.py --rate 200 --requests 1000

The server answers 100 ms after a request, then every 20 ms, fifty pieces in all. It shares the cores with the client:
what it is late with itself is told apart. A client is right if it sees a piece when the server has written it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import scripted_server

FIRST_S, EACH_S, PIECES = 0.1, 0.02, 50


async def noting(writer: asyncio.StreamWriter, first: float, each: float, pieces: int, notes: Path) -> None:
    """scripted_server's good answer, which also writes down when it began and wrote its first and last pieces."""
    begin = time.perf_counter()
    writer.write(scripted_server.HEAD + scripted_server.chunk(scripted_server.ROLE))
    moments = [begin]
    for number in range(pieces):
        await asyncio.sleep(max(0.0, begin + first + number * each - time.perf_counter()))
        moments.append(time.perf_counter())
        writer.write(scripted_server.chunk(scripted_server.event(" word")))
    writer.write(
        scripted_server.chunk(scripted_server.LAST) + scripted_server.chunk(scripted_server.DONE) + b"0\r\n\r\n"
    )
    with notes.open("a") as file:
        print(json.dumps([moments[0], moments[1], moments[-1]]), file=file)


def serve(port: int, notes: Path) -> None:
    async def pace(writer, first, each, pieces):
        await noting(writer, first, each, pieces, notes)

    scripted_server.pace = pace
    asyncio.run(scripted_server.main(port))


def percentiles(seconds: np.ndarray) -> str:
    return "  ".join(f"p{q} {np.percentile(seconds, q) * 1e3:8.2f} ms" for q in (50, 90, 99))


def check(rate: float, requests: int) -> None:
    from every_millisecond.serving import load, servers

    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, __file__, "--serve", "{port}", str(folder / "moments")]
    with servers.serving(command, folder / "log") as url:
        script = f"pace {FIRST_S} {EACH_S} {PIECES}"
        question = [{"role": "user", "content": "x"}]
        found = asyncio.run(
            load.open_load(url, [question], rate=rate, requests=requests, model=script, max_tokens=PIECES)
        )
    print(found.report())
    noted = np.array([json.loads(line) for line in (folder / "moments").read_text().splitlines()])
    whole = found.whole
    first = np.sort([answer.arrivals[0] for answer in whole])
    sent = np.sort([answer.sent for answer in whole])
    late = np.array([answer.sent - answer.due for answer in whole])
    pace = np.array([(answer.arrivals[-1] - answer.arrivals[0]) / (PIECES - 1) for answer in whole])
    if len(noted) != len(whole):
        raise SystemExit(f"the server noted {len(noted)} answers, the client {len(whole)} whole ones")
    own = (noted[:, 2] - noted[:, 1]) / (PIECES - 1)
    print(f"  the client sent late by               {percentiles(late)}")
    print(f"  the server had a request after        {percentiles(np.sort(noted[:, 0]) - sent)}")
    print(f"  saw first pieces after they were sent {percentiles(first - np.sort(noted[:, 1]))}")
    print(f"  server's own delay of a first piece   {percentiles(noted[:, 1] - noted[:, 0] - FIRST_S)}")
    print(f"  a token by the server's clock         {percentiles(own)}")
    print(f"  a token by the client's               {percentiles(pace)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "NOTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(int(options.serve[0]), Path(options.serve[1]))
    for rate, requests in [(options.rate, options.requests)] if options.rate else [(50, 500), (480, 2400)]:
        check(rate, requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
