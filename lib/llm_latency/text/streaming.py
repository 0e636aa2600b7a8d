"""Text from token ids, piece by piece, while the answer is still being written."""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Protocol

from llm_latency.arguments import check_token_id

# What a decoder writes for bytes that are not (yet) a character.
REPLACEMENT = "\ufffd"
# SentencePiece vocabularies spell a rare character as one token per byte.
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
# Tokens kept in front of new ones, so that a decoder that strips the first blank strips it from known text.
CONTEXT_TOKENS = 4
WINDOW_TOKENS = 24


class Decoder(Protocol):
    """What a StreamingDetokenizer needs of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str: ...


class StreamingDetokenizer:
    """Emits text as its tokens arrive; all pieces together are exactly ``tokenizer.decode`` of all ids.

    Decoding each id alone is wrong twice: a character may be spread over several tokens, and SentencePiece-like
    decoders strip the blank of a sequence's first word. So a short window of the newest tokens is decoded at each
    push, and what later tokens may still change is held back:

    - replacement characters at the end, which may be the beginning of a character;
    - a run of SentencePiece byte tokens (``<0xE4>``), which is decoded as a whole, so it is held until the run ends.

    The cost per push does not grow with the length of the answer.

    Args:
        tokenizer: anything with ``decode(list of ids) -> str``; transformers' tokenizers are meant.
        skip_special_tokens: leave markers such as the end-of-text token out; then the pieces together equal
            ``tokenizer.decode(ids, skip_special_tokens=True)``.

    Raises:
        ValueError: an id that is negative or outside the vocabulary. TypeError: an id that is not an integer.
        RuntimeError: a push after ``finish``; or, at ``finish``, a tokenizer that rewrites text behind its back
            (WordPiece clean-up does), so that no stream can equal its full decode.
    """

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = False):
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer must have a method decode(ids), got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer) if isinstance(tokenizer, Sized) else None
        self.skip_special_tokens = skip_special_tokens
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self._window_start = 0
        self._window_emitted = 0  # characters of the window's text that are out already
        self._in_byte_run = False
        self._finished = False

    @property
    def text(self) -> str:
        """All that has been emitted so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Takes one token id and returns the text that is now certain, possibly an empty string."""
        if self._finished:
            raise RuntimeError("this stream is finished; begin a new StreamingDetokenizer for a new answer")
        self.token_ids.append(check_token_id(token_id, self.vocab_size))
        # A marker that is left out does not end a run of bytes either.
        newest = self.token_ids[-1]
        self._in_byte_run = self._is_byte_token(newest) or (self._in_byte_run and not self._decode([newest]))
        if self._in_byte_run:
            return ""
        window = self._decode(self.token_ids[self._window_start :])
        piece = window.rstrip(REPLACEMENT)[self._window_emitted :]
        self._window_emitted += len(piece)
        if self._window_emitted == len(window):
            self._shorten_window()
        return self._emit(piece)

    def finish(self) -> str:
        """Ends the stream and returns what was held back: half a character comes out as the full decode has it."""
        if self._finished:
            return ""
        self._finished = True
        emitted, full = self.text, self._decode(self.token_ids)
        if not full.startswith(emitted):
            raise RuntimeError(
                "the tokenizer's decode of all ids changes text that was certain before (is "
                f"clean_up_tokenization_spaces on?): emitted {emitted[-40:]!r}, full decode {full[-40:]!r}"
            )
        return self._emit(full[len(emitted) :])

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _shorten_window(self) -> None:
        """Forgets old tokens; only called where every character of the window is out, so nothing is lost."""
        if len(self.token_ids) - self._window_start <= WINDOW_TOKENS:
            return
        start = len(self.token_ids) - CONTEXT_TOKENS
        context = self._decode(self.token_ids[start:])
        if context and not context.endswith(REPLACEMENT):
            self._window_start, self._window_emitted = start, len(context)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        if self.skip_special_tokens:
            return self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return self.tokenizer.decode(token_ids)

    def _is_byte_token(self, token_id: int) -> bool:
        spell = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        spelling = spell(token_id) if spell else None
        return isinstance(spelling, str) and BYTE_TOKEN.match(spelling) is not None
