"""Fit a prompt into a budget of tokens by rules, and tell what was left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a prompt.

    Args:
        name: how the report calls it.
        text: its words.
        importance: the lowest goes first when the prompt must shrink.
        required: never dropped and never shortened by sentences.
        verbatim: code or data, in which blanks carry meaning: no rule rewrites it.
    """

    name: str
    text: str
    importance: int = 0
    required: bool = False
    verbatim: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """One thing that a rule took away."""

    section: str
    rule: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class CompressedPrompt:
    """The prompt that fits, and what it cost."""

    text: str
    tokens_before: int
    tokens: int
    budget: int
    dropped: tuple[Dropped, ...]

    def report(self) -> str:
        """A line per dropped piece, in the order in which the rules took them."""
        lines = [f"{self.tokens_before} tokens -> {self.tokens} (budget {self.budget})"]
        for piece in self.dropped:
            shown = " ".join(piece.text.split())
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            lines.append(f"  {piece.rule:<12}{piece.section:<14}{piece.tokens:>5} tokens  {shown}")
        return "\n".join(lines)


SEPARATOR = "\n\n"
# take(section, rule, the shorter text, what went): how a rule changes a text, so that nothing goes unreported.
Take = Callable[[Section, str, str, str], None]
# A sentence ends where a capital, a bracket or a new line follows its stop: "e.g. 5" is no end.
SENTENCE_END = re.compile(r"(?<=[.!?])(?:(?=\s+[A-Z(\"'])|(?=\s*\n))")
# Phrases that carry politeness, no information. Matched whole, whatever their case.
FILLERS = (
    r"please note that ",
    r"it is important to (note|remember) that ",
    r"as (you may know|we all know|mentioned above), ",
    r"i would (really )?like you to ",
    r"(could|can|would) you (please )?",
    r"please ",
    r"basically,? ",
    r"thank you( very much)?( in advance)?[.!] ?",
)
FILLER = re.compile(r"\b(?:" + "|".join(FILLERS) + ")", re.IGNORECASE)


def compress_prompt(sections: Sequence[Section], tokenizer: Any, *, budget: int) -> CompressedPrompt:
    """Applies the rules one after another, the harmless ones first, and stops as soon as the prompt fits.

    1. ``blanks``: runs of blanks and empty lines become one (not in verbatim sections).
    2. ``repeats``: a sentence that stands further up, or in a required section, already goes.
    3. ``fillers``: phrases without content go.
    4. ``section``: sections that are not required go, least important first. Before a whole section goes, its
       sentences go from the end (rule ``sentence``), unless it is verbatim.

    Nothing is ever cut within a sentence, and nothing goes unreported.

    Args:
        tokenizer: counts the tokens, without special ones.
        budget: the most tokens that the text may have.

    Raises:
        ValueError: no sections, two of one name, a budget below 1, or a budget that the required sections exceed.
    """
    names = [section.name for section in sections]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"sections must be given and have different names, got {names}")
    if budget < 1:
        raise ValueError(f"budget must be at least 1 token, got {budget}")

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    texts = {section.name: section.text for section in sections}
    dropped: list[Dropped] = []
    before = count(_join(texts))

    def take(section: Section, rule: str, shorter: str, gone: str) -> None:
        saved = count(texts[section.name]) - count(shorter)
        texts[section.name] = shorter
        dropped.append(Dropped(section.name, rule, gone, saved))

    def fits() -> bool:
        return count(_join(texts)) <= budget

    rules: tuple[Callable[..., None], ...] = (_blanks, _repeats, _fillers, _sections)
    for rule in rules:
        if fits():
            break
        rule(sections, texts, take, fits)
    if not fits():
        raise ValueError(
            f"the required sections have {count(_join(texts))} tokens after all rules, more than the budget of {budget}"
        )
    text = _join(texts)
    return CompressedPrompt(text, before, count(text), budget, tuple(dropped))


def _join(texts: dict[str, str]) -> str:
    return SEPARATOR.join(text for text in texts.values() if text)


def _blanks(sections: Sequence[Section], texts: dict[str, str], take: Take, fits: Callable[[], bool]) -> None:
    for section in sections:
        if section.verbatim:
            continue
        lines = [re.sub(r"[ \t]+", " ", line).strip() for line in texts[section.name].splitlines()]
        tidy = re.sub(r"\n{2,}", "\n", "\n".join(lines)).strip()
        if tidy != texts[section.name]:
            take(section, "blanks", tidy, "blanks and empty lines")


def _repeats(sections: Sequence[Section], texts: dict[str, str], take: Take, fits: Callable[[], bool]) -> None:
    seen: set[str] = set()
    # Required sections first: a sentence must not be taken from one because it stands in another that may yet go.
    for section in sorted(sections, key=lambda section: not section.required):
        if section.verbatim:
            continue
        kept, gone = [], []
        for sentence in SENTENCE_END.split(texts[section.name]):
            key = " ".join(sentence.lower().split())
            (gone if key and key in seen else kept).append(sentence)
            seen.add(key)
        if gone:
            take(section, "repeats", "".join(kept).strip(), "".join(gone))


def _fillers(sections: Sequence[Section], texts: dict[str, str], take: Take, fits: Callable[[], bool]) -> None:
    for section in sections:
        if section.verbatim:
            continue
        gone = [match.group().strip() for match in FILLER.finditer(texts[section.name])]
        if gone:
            take(section, "fillers", FILLER.sub("", texts[section.name]).strip(), ", ".join(gone))


def _sections(sections: Sequence[Section], texts: dict[str, str], take: Take, fits: Callable[[], bool]) -> None:
    optional = [section for section in sections if not section.required]
    for section in sorted(optional, key=lambda section: section.importance):
        sentences = [] if section.verbatim else SENTENCE_END.split(texts[section.name])
        while len(sentences) > 1 and not fits():
            gone = sentences.pop()
            take(section, "sentence", "".join(sentences), gone)
        if fits():
            return
        take(section, "section", "", texts[section.name])
