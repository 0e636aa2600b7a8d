"""Vocabularies with the habits of real ones, for the exercises on text: pieces of bytes, and words that merge."""

from __future__ import annotations


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
