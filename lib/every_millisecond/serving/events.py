"""Server-sent events: the bytes of a streamed answer, cut into its messages (WHATWG HTML, section 9.2.6).

Libraries that split the text with `str.splitlines` end a line at U+2028 or a form feed, too, and so break a JSON
message that holds one; the standard knows three line ends, and a server may end a chunk inside any of them.
"""

from __future__ import annotations

import codecs


class EventDecoder:
    """Feed it bytes as they arrive; it gives the data of each event that they complete.

    Chunks may end anywhere: inside a character, a line end, a message. Lines end with LF, CR or CR LF. Comments and
    fields other than `data` are passed over, as the standard says. Raises ValueError for bytes that are not UTF-8.
    """

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8-sig")()  # one byte-order mark may come first
        self._rest = ""  # of a line that has not ended yet
        self._data: list[str] = []

    def push(self, chunk: bytes) -> list[str]:
        """The data of the events that end in this chunk, in order."""
        try:
            self._rest += self._text.decode(chunk)
        except UnicodeDecodeError as error:
            raise ValueError(f"the stream is not UTF-8: {error}") from None
        events = []
        while (line := self._line()) is not None:
            if line == "":
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
            elif line.startswith("data"):
                field, _, value = line.partition(":")
                if field == "data":
                    self._data.append(value.removeprefix(" "))
        return events

    def _line(self) -> str | None:
        """The next whole line without its end; None until there is one."""
        ends = [i for i in (self._rest.find("\n"), self._rest.find("\r")) if i >= 0]
        if not ends:
            return None
        end = min(ends)
        if self._rest[end] == "\r" and end + 1 == len(self._rest):
            return None  # the LF of a CR LF may still be on its way
        after = end + (2 if self._rest[end : end + 2] == "\r\n" else 1)
        line, self._rest = self._rest[:end], self._rest[after:]
        return line
