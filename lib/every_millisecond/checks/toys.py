"""Caches, pools, models and tokenizers as small as they get, with the habits of real ones, for the exercises."""

from __future__ import annotations

import torch


class Values:
    """The values of one head: old tokens as INT8 codes with a scale each, the newest `residual` exactly."""

    def __init__(self, residual, channels):
        self.residual = residual
        self.codes = torch.zeros(0, channels, dtype=torch.int8)  # [old, channels]
        self.scales = torch.zeros(0, 1)  # [old, 1]
        self.exact = torch.zeros(0, channels)  # [at most residual, channels]

    def read(self):
        """All tokens, oldest first: [old + exact, channels]."""
        return torch.cat([self.codes * self.scales, self.exact])


class OutOfPages(Exception):
    """The pool has too few free pages; nothing was changed."""


class Pool:
    """Pages of `page_size` slots, one token each. Slot s lies in page s // page_size."""

    def __init__(self, num_pages, page_size):
        self.page_size = page_size
        self.free = list(range(num_pages))  # pages that nobody has, in any order
        self.tables = {}  # request -> its pages, the first tokens' page first
        self.filled = {}  # request -> how many tokens it has stored


class ToyModel:
    """A causal language model: what it says at a position depends on the ids up to there, and on nothing after.

    Called with ids [batch, n]; the logits [batch, n, 97] at a position predict the token after it.
    """

    def __init__(self):
        self.calls = 0

    def __call__(self, ids):
        self.calls += 1
        state, choices = torch.ones(ids.shape[0], dtype=torch.long), []
        for column in ids.T:
            state = (state * 31 + column + 7) % 997
            choices.append(state % 97)
        return torch.nn.functional.one_hot(torch.stack(choices, 1), 97).float()


class BytePieces:
    """A vocabulary of pieces of UTF-8. `decode` joins them; what is no whole character becomes U+FFFD.

    A space that begins the decoded text is dropped, as SentencePiece does: pieces carry the space before a word.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.decoded = 0  # ids decoded so far, all calls together

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        text = b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ")


class StreamParts:
    """What a stream of text remembers, and how it ends; `push` is the learner's."""

    def __init__(self, decode):
        self.decode = decode  # list of ids -> text
        self.ids = []
        self.shown = 0  # characters returned so far

    def finish(self):
        """The text that is left at the end."""
        return self.decode(self.ids)[self.shown :]


class WindowParts:
    """What a stream with a window remembers, and how it ends; `push` is the learner's."""

    def __init__(self, decode):
        self.decode = decode  # list of ids -> text
        self.ids = []
        self.start = 0  # decoding begins here
        self.read = 0  # everything in front of this has been shown

    def finish(self):
        """The text that is left at the end."""
        shown = self.decode(self.ids[self.start : self.read])
        return self.decode(self.ids[self.start :])[len(shown) :]


class MergingTokenizer:
    """Takes the longest piece that it knows, again and again. Id 1 begins a text, id 2 is the marker "<end>".

    At a marker the text is cut before anything else; a piece never reaches across it.
    """

    marker, bos_token_id = "<end>", 1
    _pieces = ("solution", "sol", "ution", "the", "then", "ex", "explain", "plain", "in", " the", " solution", "in the")

    def __init__(self) -> None:
        self.characters = 0  # tokenised so far, all calls together

    def __call__(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        ids = [self.bos_token_id] if add_special_tokens else []
        for number, part in enumerate(text.split(self.marker)):
            ids += [2] * (number > 0) + self._words(part)
        return ids

    def _words(self, text: str) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self._pieces if text.startswith(p)), key=len, default=text[0])
            ids.append(3 + self._pieces.index(piece) if piece in self._pieces else 100 + ord(piece))
            text = text[len(piece) :]
        return ids


class ToyTokenizer:
    """Ids 0, 1, 2 are unknown, beginning and end of text; every other character is one token.

    Calling it adds the beginning of text unless told otherwise. The chat template writes it as text, "<s>".
    """

    bos_token, bos_token_id, eos_token_id = "<s>", 1, 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [self.bos_token_id] if add_special_tokens else []
        for number, piece in enumerate(text.split(self.bos_token)):
            ids += [self.bos_token_id] * (number > 0) + [3 + ord(character) for character in piece]
        return ids

    def apply_chat_template(self, question: str) -> str:
        """The chat as text, ready for the model's answer."""
        return f"{self.bos_token}[user] {question} [assistant] "
