"""One streamed answer of an OpenAI-compatible server: what came when, or why it did not come."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from every_millisecond.processes import printable
from every_millisecond.serving.events import EventDecoder

STALL_S = 10.0  # without a byte: the answer is given up
LONGEST_S = 600.0


@dataclass(slots=True)
class Answer:
    """One request, its times in seconds of one clock (`time.perf_counter`).

    due: when it should have been sent. sent: when it was. arrivals: when each piece of text arrived; a piece is mostly
    a token, but a server may send several together. tokens: as the server counts them, where it says so. error: why
    there is no whole answer; times of such a one enter no figure.
    """

    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def pieces(self) -> int:
        return len(self.arrivals)

    @property
    def ttft_ms(self) -> float:
        """From the moment at which the user asked, whether or not the client was ready, to the first piece of text."""
        return (self.arrivals[0] - self.due) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None for an answer of one."""
        count = self.tokens if self.tokens is not None else self.pieces
        return (self.arrivals[-1] - self.arrivals[0]) * 1e3 / (count - 1) if count > 1 else None

    @property
    def end_to_end_ms(self) -> float:
        return (self.arrivals[-1] - self.due) * 1e3


def check_url(url: str) -> str:
    """The server's address without a slash at its end and without /v1. Raises ValueError for anything else than one."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"server address {url!r}; expected one like http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


def one_each() -> aiohttp.ClientSession:
    """A session whose requests have a connection each, as from one more user, and no limit to how many.

    llama.cpp's server offers to keep a connection and closes it behind each stream: a request that is on its way on it
    by then is lost, and would count as the server's failure. Make it where an event loop runs.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    messages: list[dict[str, str]],
    *,
    model: str,
    max_tokens: int,
    due: float | None = None,
    stall_s: float = STALL_S,
    **options: object,
) -> Answer:
    """Send one chat request and take the times of its stream. Never raises for what a server does: see `Answer.error`.

    session: see `one_each`. due: when the request should have been sent, if not now. stall_s: so long without a byte
    ends it. options: further fields of the request's body.
    """
    body = {
        "model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **options,
    }  # fmt: skip
    answer = Answer(due=time.perf_counter() if due is None else due)
    chunks: list[tuple[float, bytes]] = []  # read now, understood later: decoding would delay the clock
    answer.sent = time.perf_counter()
    try:
        limit = aiohttp.ClientTimeout(total=LONGEST_S, sock_connect=stall_s, sock_read=stall_s)
        async with session.post(f"{check_url(url)}/v1/chat/completions", json=body, timeout=limit) as response:
            if response.status != 200:
                said = printable((await response.text(errors="replace"))[:200]).strip()
                answer.error = f"HTTP {response.status}: {said or response.reason}"
                return answer
            if response.content_type != "text/event-stream":
                answer.error = f"no stream: content type {response.content_type!r}; expected 'text/event-stream'"
                return answer
            async for chunk in response.content.iter_any():
                chunks.append((time.perf_counter(), chunk))
    except aiohttp.ServerTimeoutError:
        answer.error = f"stalled: nothing came for {stall_s:g} s"
    except asyncio.TimeoutError:
        answer.error = f"not finished after {LONGEST_S:g} s"
    except aiohttp.ClientConnectorCertificateError as error:
        answer.error = f"TLS: the certificate is not accepted: {error.certificate_error}"
    except aiohttp.ClientSSLError as error:
        answer.error = f"TLS: {error}; is it http:// instead of https://?"
    except aiohttp.ClientConnectorError as error:
        answer.error = f"no connection: {error.os_error.strerror or error}; is the server up at {url}?"
    except (aiohttp.ClientError, OSError) as error:
        answer.error = f"the connection ended: {printable(str(error)) or type(error).__name__}"
    _understand(answer, chunks)
    return answer


def _understand(answer: Answer, chunks: list[tuple[float, bytes]]) -> None:
    """Read the stream's messages into the answer; an error of the connection stays the reason if there is one."""
    decoder, finished = EventDecoder(), False
    try:
        for moment, chunk in chunks:
            for data in decoder.push(chunk):
                if data.strip() == "[DONE]":
                    finished = True
                elif _message(answer, json.loads(data), moment):
                    finished = True
    except json.JSONDecodeError as error:
        answer.error = answer.error or f"an event is not JSON: {printable(error.doc[:80])!r}"
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        answer.error = answer.error or f"an event makes no sense: {error}"
    if not finished:
        answer.error = answer.error or f"the stream broke off after {answer.pieces} pieces of text"
    elif not answer.arrivals:
        answer.error = answer.error or "the answer holds no text"


def _message(answer: Answer, message: dict, moment: float) -> bool:
    """Take in one message; whether it says that the answer is complete."""
    if message.get("error"):
        error = message["error"]
        raise ValueError(f"the server says {error.get('message', error) if isinstance(error, dict) else error}")
    if usage := message.get("usage"):  # mostly in a last message without choices, or in none
        answer.tokens = int(usage["completion_tokens"])
    complete = False
    for choice in message.get("choices") or []:
        if choice.get("index", 0) != 0:
            note = "several choices; the first is counted"
            answer.notes += [note] if note not in answer.notes else []
            continue
        piece = (choice.get("delta") or {}).get("content")
        if piece:  # the first message names the role and has no text; an empty one is no token
            answer.text += piece
            answer.arrivals.append(moment)
        complete = complete or choice.get("finish_reason") is not None
    return complete
