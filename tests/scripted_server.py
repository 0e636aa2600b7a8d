"""A server that answers as it is told to, well or badly: `python tests/scripted_server.py PORT`.

The request's "model" is the script: "pace TTFT TPOT TOKENS" in seconds for a good answer, or the name of a fault.
"""

from __future__ import annotations

import asyncio
import json
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(piece: str | None, *, index: int = 0, reason: str | None = None, end: str = "\n\n", **more) -> bytes:
    delta = {} if piece is None else {"content": piece}
    message = {"choices": [{"index": index, "delta": delta, "finish_reason": reason}], **more}
    return f"data: {json.dumps(message, ensure_ascii=False)}{end}".encode()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
LAST = event(None, reason="stop")
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'
WORDS = [event("a"), event(" b")]
SCRIPTS: dict[str, list[bytes]] = {
    "usage last": [ROLE, *WORDS, LAST, USAGE, DONE],
    "no usage": [ROLE, *WORDS, LAST, DONE],
    "no done": [ROLE, *WORDS, LAST],
    "no end": [ROLE, *WORDS],
    "several choices": [ROLE, event("a"), event("x", index=1), event(" b"), LAST, DONE],
    "empty deltas": [ROLE, event(""), event("a"), event(None), event(" b"), event(""), LAST, DONE],
    "carriage returns": [ROLE, event("a", end="\r\r"), event(" b", end="\r\n\r\n"), LAST.replace(b"\n", b"\r"), DONE],
    "separator inside": [ROLE, event("a\u2028b"), LAST, DONE],
    "comments": [b": ping\n\n", ROLE, b"id: 5\nretry: 10\n" + event("a"), event(" b"), LAST, DONE],
    "split": [
        bytes([byte]) for byte in b"\xef\xbb\xbf" + event("né") + event("é\U0001f600", end="\r\n\r\n") + LAST + DONE
    ],
    "together": [b"".join([ROLE, *WORDS, LAST, DONE])],
    "not json": [ROLE, event("a"), b"data: {oops\n\n", DONE],
    "not utf-8": [ROLE, b"data: \xff\xfe\n\n", DONE],
    "a list": [ROLE, b"data: [1, 2]\n\n", DONE],
    "says error": [ROLE, event("a"), b'data: {"error":{"message":"out of memory"}}\n\n'],
    "no text": [ROLE, LAST, DONE],
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(status: str, body: bytes, kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(), kind.encode(), len(body), body,
    )  # fmt: skip


async def pace(writer: asyncio.StreamWriter, first: float, each: float, tokens: int) -> None:
    """A good answer whose pieces leave at known moments."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    writer.write(HEAD + chunk(ROLE))
    for number in range(tokens):
        await asyncio.sleep(max(0.0, begin + first + number * each - loop.time()))
        writer.write(chunk(event(" word")))
    usage = {"choices": [], "usage": {"completion_tokens": tokens}}
    writer.write(chunk(LAST) + chunk(b"data: %s\n\n" % json.dumps(usage).encode()) + chunk(DONE) + b"0\r\n\r\n")


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while first := await reader.read(1):
            if first == b"\x16":  # a TLS client's hello: answered in plain text, as real servers do
                writer.write(plain("400 Bad Request", b"{}"))
                return
            line, length = first + await reader.readline(), 0
            while (header := await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            if line.startswith(b"GET"):
                writer.write(plain("200 OK", b"{}"))
                continue
            script = json.loads(await reader.readexactly(length))["model"]
            if script.startswith("pace "):
                first, each, tokens = script.split()[1:]
                await pace(writer, float(first), float(each), int(tokens))
            elif script == "500":
                writer.write(plain("500 Internal Server Error", b"out of \x1b[31mslots"))
            elif script == "no stream":
                writer.write(plain("200 OK", b'{"choices":[]}'))
            elif script == "dies":
                writer.write(HEAD + chunk(ROLE) + chunk(WORDS[0]))
                await writer.drain()
                return
            elif script == "closes behind":  # whole, and the connection ends without a word: as llama.cpp does
                writer.write(HEAD + b"".join(map(chunk, SCRIPTS["usage last"])) + b"0\r\n\r\n")
                await writer.drain()
                return
            elif script == "stalls":
                writer.write(HEAD + chunk(ROLE) + chunk(WORDS[0]))
                await asyncio.sleep(3600)
            else:
                writer.write(HEAD)
                for data in SCRIPTS[script]:
                    writer.write(chunk(data))
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main(port: int) -> None:
    async with await asyncio.start_server(serve, "127.0.0.1", port, backlog=2048) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
