"""Token ids of prompts that come again, and of prefixes that many prompts share."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_latency.arguments import check_count


@dataclass(slots=True)
class TokenCacheStats:
    """How often `TokenCache.encode` found the whole text, found a prefix, or had to tokenise everything."""

    hits: int = 0
    prefix_hits: int = 0
    misses: int = 0


class TokenCache:
    """Remembers token ids; what it returns is always what the tokenizer would return for the whole text.

    Tokenisation does not concatenate: the ids of "Hello wor" and "ld" are not those of "Hello world". A prefix can be
    cut off safely only where the tokenizer itself cuts before it looks at words: behind a special marker such as
    ``<|im_end|>``. The rest is then tokenised with that marker in front, which is dropped again, since the first word
    of a text is treated differently from a word behind a marker. Chat prompts are full of such places; a prefix
    without any marker is remembered as a whole text only.

    Args:
        tokenizer: a transformers tokenizer. Everything is forgotten when it changes: tokens added to it, another
            pre-tokenizer, or another tokenizer put in its place.
        max_entries: whole texts kept; the one not used for longest goes first. Prefixes given to `remember` stay.

    Raises:
        ValueError: max_entries below 1. TypeError: max_entries that is no integer, a text that is not a string.
    """

    def __init__(self, tokenizer: Any, *, max_entries: int = 1024):
        self.tokenizer = tokenizer
        self.max_entries = check_count("max_entries", max_entries)
        self.stats = TokenCacheStats()
        self._forget()

    def _forget(self) -> None:
        """Begin anew with the tokenizer as it now is."""
        self._state = _state(self.tokenizer)
        self._texts: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._prefixes: dict[str, tuple[int, ...]] = {}
        self._front, self._behind = _frame(self.tokenizer)
        markers = _safe_markers(self.tokenizer)
        self._marker_pattern = re.compile("|".join(map(re.escape, markers))) if markers else None

    def remember(self, text: str) -> int:
        """Tokenises a common prompt or prefix ahead of time.

        Returns:
            How many of its tokens any text that begins with it can reuse: those up to its last marker.
        """
        self.encode(text, add_special_tokens=False)
        cuts = self._cuts(text)
        if not cuts:
            return 0
        prefix = text[: cuts[-1]]
        self._prefixes[prefix] = tuple(self._tokenise(prefix))
        return len(self._prefixes[prefix])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text, as ``tokenizer.encode`` gives them, with one exception: never two beginning-of-text ids.

        A chat template writes the beginning-of-text marker into its text; where the tokenizer would add another in
        front, it is left out.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        if self._state != _state(self.tokenizer):
            self._forget()
        key = (text, add_special_tokens)
        if key in self._texts:
            self.stats.hits += 1
            self._texts.move_to_end(key)
            return list(self._texts[key])
        ids = self._encode_new(text)
        if add_special_tokens:
            twice = bool(self._front and ids) and self._front[-1] == ids[0] == self.tokenizer.bos_token_id
            ids = [*(self._front[:-1] if twice else self._front), *ids, *self._behind]
        self._texts[key] = tuple(ids)
        if len(self._texts) > self.max_entries:
            self._texts.popitem(last=False)
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat in the tokenizer's template; exactly the markers that the template writes, none added."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False)

    def _encode_new(self, text: str) -> list[int]:
        for cut in reversed(self._cuts(text)):
            prefix_ids = self._prefixes.get(text[:cut])
            if prefix_ids is None:
                continue
            marker_id = prefix_ids[-1]
            marker = self.tokenizer.convert_ids_to_tokens(marker_id)
            rest = self._tokenise(marker + text[cut:])
            if rest and rest[0] == marker_id:
                self.stats.prefix_hits += 1
                return [*prefix_ids, *rest[1:]]
        self.stats.misses += 1
        return self._tokenise(text)

    def _cuts(self, text: str) -> list[int]:
        """Positions right behind a marker, in order."""
        return [match.end() for match in self._marker_pattern.finditer(text)] if self._marker_pattern else []

    def _tokenise(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _state(tokenizer: Any) -> tuple:
    """What decides a text's ids and may change while a tokenizer lives: equal for the same tokenizer, unchanged."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    return tokenizer, len(tokenizer), tuple(added), tuple(step and step.__getstate__() for step in steps)


def _safe_markers(tokenizer: Any) -> list[str]:
    """Special tokens at which every text is cut before anything else happens to it.

    Left out: those that match only as a whole word, or after normalisation, and those inside a longer one.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    contents = [token.content for token in added]
    return [
        token.content
        for token in added
        if token.special
        and not token.single_word
        and not token.normalized
        and not any(token.content in other and token.content != other for other in contents)
    ]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts in front of every text, and behind it."""
    bare, framed = list(tokenizer.encode("a", add_special_tokens=False)), list(tokenizer.encode("a"))
    for at in range(len(framed) - len(bare) + 1):
        if framed[at : at + len(bare)] == bare:
            return framed[:at], framed[at + len(bare) :]
    raise ValueError(f"{type(tokenizer).__name__} tokenises differently when it adds special tokens: {bare}, {framed}")
