"""What a claim is, as data: its premise, what it says of which figure, its limits; and how figures decide it.

A verdict is about this machine and about the claim's own premise. Nothing computed or simulated enters it: what
arithmetic alone says of a claim stands beside its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from every_millisecond.notebook.outcome import Interval
from llm_latency import roofline
from llm_latency.roofline import total
from llm_latency.timing.compare import Ratio

TRUE, FALSE, TIE, NOT_MEASURED = "true here", "false here", "no measurable difference", "not measured here"
VERDICTS = (TRUE, FALSE, TIE, NOT_MEASURED)
WORDS = ("possible", "impossible", "only if", "says nothing")  # arithmetic's

Figure = float | Interval | Ratio | Mapping[str, float]
Figures = Mapping[str, Figure]  # what one machine measured for one claim, by name

MODEL, CONTEXT = "llama-2-7b", 4096  # the articles' model, and where its context ends
A100 = "A100-80GB-SXM"
INFINITY = math.inf

# Every claim by its id, filled by `claim` as the files of this package are loaded.
CHECKS: dict[str, Claim] = {}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What datasheets, counts and published figures say of a claim: a word of theirs, a sentence, and its working."""

    word: str
    text: str
    lines: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise ValueError(f"word={self.word!r}; expected one of {', '.join(WORDS)}")

    def __str__(self) -> str:
        return f"{self.word} {self.text}" if self.word == "only if" else f"{self.word}: {self.text}"


MOST_SHARE = 1.1  # a premise up to here is a share (an acceptance, a draft's cost), beyond it a count


@dataclass(frozen=True, slots=True)
class Need:
    """A premise: unless `figure` was given and lies in its range, a measurement does not speak of the claim."""

    figure: str
    words: str
    low: float = 1.0
    high: float = 1.0

    def unmet(self, here: Mapping[str, Interval]) -> str:
        if self.figure not in here:
            return f"the claim speaks of {self.words}, and that was not measured ({self.figure})"
        found = here[self.figure].median
        if self.high > MOST_SHARE:  # a count, an average over passes perhaps: 2.9 guesses are 3, as they print
            found = round(found)
        if self.low <= found <= self.high:
            return ""
        if self.low == self.high == 1.0:  # a flag
            return f"the claim speaks of {self.words}, and here there is none"
        figure = f"{found:.1%}" if self.high <= MOST_SHARE else f"{found:,.0f}"
        return f"the claim speaks of {self.words}; here it is {figure}"


ON_CUDA = Need("cuda", "a CUDA GPU")
SEVEN_B = Need("parameters", "a 7B model", 6e9, 8e9)
ON_A100 = Need("a100", "an A100")


@dataclass(frozen=True, slots=True)
class Part:
    """What a claim says of one figure.

    says: the sentence; {v} stands for the figure, and both sides of a comparison are named. low, high: in between the
    claim is right. same: the value of "no difference" (1 for a ratio of two times), None where nothing is compared.
    over: a second figure that the first is divided by. length: a figure that counts tokens; where it was given, the
    sentence names it at {of}. needed: without it the claim is not measured. tolerance: half the spread that a bare
    number is given. form: how the figure prints, and its unit.
    """

    figure: str
    says: str
    low: float = -INFINITY
    high: float = INFINITY
    same: float | None = None
    over: str = ""
    length: str = ""
    needed: bool = True
    tolerance: float = 0.0
    form: str = ".2f times"

    def told(self, here: Mapping[str, Interval]) -> Part:
        """The part with its sentence's length filled in, or left out where that was not given."""
        of = f" of {here[self.length].median:,.0f} tokens" if self.length in here else ""
        return replace(self, says=self.says.replace("{of}", of))

    def value(self, here: Mapping[str, Interval]) -> Interval | None:
        """The figure with its spread, None unless it was measured."""
        if not {self.figure, self.over or self.figure} <= set(here):
            return None
        x = here[self.figure]
        if self.over:
            y = here[self.over]
            if y.low <= 0:
                raise ValueError(f"{self.over}={y}; expected more than 0")
            return Interval(x.median / y.median, x.low / y.high, x.high / y.low)
        if x.low == x.high:
            return Interval(x.median, x.median - self.tolerance, x.median + self.tolerance)
        return x

    def marks(self, x: Interval) -> list[float]:
        """The values from which a figure cannot be told: no difference, or else an end of the claim's range."""
        if self.same is not None and x.low <= self.same <= x.high and not self.low < self.same < self.high:
            return [self.same]
        return [mark for mark in (self.low, self.high) if x.low < mark < x.high]

    def verdict(self, x: Interval) -> str:
        if x.high < self.low or x.low > self.high:
            return FALSE  # the whole spread is outside of what is claimed, "no difference" in it or not
        if self.marks(x):
            return TIE
        return TRUE if self.low <= x.median <= self.high else FALSE

    def _form(self, x: Interval) -> str:
        """The figure's form, with up to three digits more where rounding would put a figure onto the end it misses."""
        head, _, rest = self.form.split()[0].partition(".")
        beyond = [end for end in (self.low, self.high) if (x.median < end) == (end == self.low) and x.median != end]
        for digits in range(int(rest[0]), int(rest[0]) + 4):
            form = f"{head}.{digits}{rest[1:]}"
            if all(format(x.median, form) != format(end, form) for end in beyond):
                break
        return form

    def _words(self, value: float, form: str) -> str:
        """A value in a form of its own, with the figure's unit."""
        return f"{value:{form}}" + self.form.removeprefix(self.form.split()[0])

    def _plain(self, value: float) -> str:
        if value == self.same:
            return self._words(value, self.form.split()[0])
        return f"{100 * value:g}%" if "%" in self.form else self._words(value, ",g")

    @property
    def claimed(self) -> str:
        """The claim's range in words."""
        if math.isinf(self.high):
            return f"{'more than' if self.low == self.same else 'at least'} {self._plain(self.low)}"
        if math.isinf(self.low):
            return f"{'less than' if self.high == self.same else 'at most'} {self._plain(self.high)}"
        return f"{self._plain(self.low).split()[0]} to {self._plain(self.high)}"

    def found(self, x: Interval) -> str:
        """What was measured, as a clause."""
        form = self._form(x)
        spread = f" ({x.low:{form}} to {x.high:{form}})" if x.high - x.low > 2.001 * self.tolerance else ""
        return self.says.format(v=self._words(x.median, form) + spread)

    def compared(self, x: Interval) -> str:
        """What was measured beside what was claimed."""
        marks = " and ".join(self._plain(mark) for mark in self.marks(x))
        undecided = f", which cannot be told apart from {marks}" if marks else ""
        return f"{self.found(x)}{undecided} (the claim needs {self.claimed})"

    def only_its_limit(self, x: Interval) -> bool:
        """Undecided although the figure differs from "no difference": its spread holds an end of the claim's range."""
        return bool(self.marks(x)) and self.same not in self.marks(x)


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim judged, a row of the ledger: what arithmetic says, and the verdict of this machine's own figures.

    here: what was measured. alarm: the figures beat physics, so that they decide nothing. recorded: what other machines
    found. settled_by: "here", "recorded" (another machine's figures settle it, not this one's) or "nothing".
    at_its_limit: what is not measurable is a difference from the claim's limit, not a difference as such.
    """

    id: str
    claim: str
    premise: str
    stated: tuple[str, ...]
    arithmetic: Arithmetic
    verdict: str
    reason: str
    here: tuple[str, ...]
    alarm: str = ""
    recorded: tuple[str, ...] = ()
    settled_by: str = "nothing"
    at_its_limit: bool = False

    @property
    def words(self) -> str:
        """The verdict, and what a measured difference could not be told from."""
        return f"{self.verdict} from the claim's limit" if self.at_its_limit else self.verdict

    @property
    def line(self) -> str:
        """The verdict as one sentence, or the alarm."""
        return f"ALARM: {self.id}: {self.alarm}" if self.alarm else f"{self.id} {self.words}: {self.reason}"

    def report(self) -> str:
        """All of it, for `print`."""
        lines = [f"{self.id}: {self.claim}", f"    premise: {self.premise}"]
        lines += [f"    says: {line}" for line in self.stated]
        lines += [f"    by arithmetic: {self.arithmetic}", *(f"      {line}" for line in self.arithmetic.lines)]
        lines += [f"    measured here: {line}" for line in self.here]
        lines += [f"    recorded: {line}" for line in self.recorded]
        return "\n".join([*lines, f"    {self.line}"])

    __str__ = report

    def cells(self) -> list[str]:
        """The claim as a row of a table: see `ledger.HEADERS`."""
        found = ("; ".join(lines) or "-" for lines in (self.here, self.recorded))
        verdict = f"{self.words}: {self.alarm and 'ALARM: '}{self.alarm or self.reason}"
        return [self.id, self.claim, self.premise, str(self.arithmetic), *found, verdict]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the articles, called with the figures of one machine to be judged.

    setting: the premise that no figure shows; needs: those that figures show. parts: what it says, all of which must
    be right. notes: further figures, which print and decide nothing. contains: claims that it cannot outlive.
    work: what arithmetic says. physics: figures that cannot be, from the others of the machine: (least, most).
    """

    id: str
    title: str
    work: Callable[[], Arithmetic]
    parts: tuple[Part, ...]
    needs: tuple[Need, ...] = ()
    notes: Mapping[str, str] | None = None
    setting: str = ""
    contains: tuple[str, ...] = ()
    physics: Mapping[str, Callable[[Mapping[str, float]], tuple[float, float]]] | None = None

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures that it takes; each is optional."""
        names = [need.figure for need in self.needs]
        names += [name for part in self.parts for name in (part.figure, part.over, part.length) if name]
        return tuple(dict.fromkeys([*names, *(self.notes or {})]))

    @property
    def premise(self) -> str:
        return ", ".join([*(need.words for need in self.needs), *filter(None, [self.setting])]) or "none"

    def arithmetic(self) -> Arithmetic:
        """What arithmetic says: impossible, if it says so of a claim that this one contains."""
        for id in self.contains:
            if CHECKS[id].arithmetic().word == "impossible":
                return replace(self.work(), word="impossible", text=f"it contains {id}, which is impossible")
        return self.work()

    def _alarms(self, here: Mapping[str, float]) -> list[str]:
        """Complaints about figures that beat physics."""
        complaints = []
        for name in (self.physics or {}).keys() & here.keys():
            least, most = self.physics[name](here)
            if not least <= here[name] <= most:
                bound = f"{least:.4g} at least" if here[name] < least else f"{most:.4g} at most"
                complaints.append(f"{name} is {here[name]:.4g}, and physics allows {bound}")
        return complaints

    def __call__(self, here: Figures | None = None, beside: Mapping[str, Figures] | None = None) -> Judged:
        """Judge by one machine's figures; `beside`: the same machine's figures of other claims.

        Raises KeyError for a figure of an unknown name, which would be ignored in silence, ValueError for one that is
        neither a finite number nor an interval of such.
        """
        found = {}
        for name, value in (here or {}).items():
            if name not in self.figures:
                raise KeyError(f"{self.id} knows no figure {name!r}; expected {', '.join(self.figures)}")
            found[name] = as_interval(f"{self.id}: {name}", value)
        values = [(part.told(found), part.value(found)) for part in self.parts]
        measured = [part.found(x) for part, x in values if x is not None]
        measured += [text.format(v=found[name].median) for name, text in (self.notes or {}).items() if name in found]
        refuted = [id for id in self.contains if beside and CHECKS[id](beside.get(id), beside).verdict == FALSE]
        unmet = list(filter(None, (need.unmet(found) for need in self.needs)))
        alarms = [] if unmet else self._alarms({name: x.median for name, x in found.items()})
        wanted = [name for part in self.parts if part.needed for name in (part.figure, part.over) if name]
        missing = [name for name in wanted if name not in found]
        by_verdict = {
            word: [part.compared(x) for part, x in values if x is not None and part.verdict(x) == word]
            for word in (TRUE, FALSE, TIE)
        }
        arithmetic = self.arithmetic()
        if refuted:
            verdict, why = FALSE, [f"it contains {id}, which is false here" for id in refuted]
        elif not found and self.needs:
            verdict, why = NOT_MEASURED, [f"it needs {self.premise}"]
        elif unmet or alarms:
            verdict, why = NOT_MEASURED, unmet or ["the figures beat physics"]
        elif by_verdict[FALSE]:
            verdict, why = FALSE, by_verdict[FALSE]
        elif missing:
            verdict, why = NOT_MEASURED, [f"missing: {', '.join(missing)}", *measured]
        else:
            verdict = TIE if by_verdict[TIE] else TRUE
            why = by_verdict[verdict]
        if verdict in (FALSE, TIE) and not refuted:
            why = [*why, *(f"this part holds: {line}" for line in by_verdict[TRUE])]
        undecided = [(part, x) for part, x in values if x is not None and part.verdict(x) == TIE]
        at_its_limit = verdict == TIE and all(part.only_its_limit(x) for part, x in undecided)
        alarm = f"{'; '.join(alarms)}. Suspect the clock, the count of bytes, or the peak" if alarms else ""
        stated = tuple(part.told({}).says.format(v=part.claimed) for part in self.parts)
        return Judged(
            self.id, self.title, self.premise, stated, arithmetic, verdict, "; ".join(why), tuple(measured), alarm,
            at_its_limit=at_its_limit,
        )  # fmt: skip


def claim(id: str, title: str, *parts: Part, **rest) -> Callable[[Callable[[], Arithmetic]], Claim]:
    """Enter a claim into `CHECKS`: its data stand here, its arithmetic in the function below. Fields as in `Claim`."""

    def enter(work: Callable[[], Arithmetic]) -> Claim:
        if id in CHECKS:
            raise ValueError(f"claim {id} is checked twice")
        CHECKS[id] = Claim(id, title, work, parts, **rest)
        return CHECKS[id]

    return enter


def as_interval(name: str, value: Figure) -> Interval:
    """A figure with its spread; a bare number has none. Raises ValueError that names what is no figure."""
    if isinstance(value, Interval):
        return value
    try:
        if isinstance(value, Mapping):
            return Interval(**value)
        if isinstance(value, Ratio):
            return Interval(value.median, value.low, value.high)
        if not isinstance(value, bool) and isinstance(value, int | float):
            return Interval(*(float(value),) * 3)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r}; expected a finite number or an interval of such") from error
    raise ValueError(f"{name}={value!r}; expected a finite number or an interval of such")


def storable(value: Figure) -> float | dict[str, float]:
    """A figure as JSON keeps it and `as_interval` reads it again."""
    x = as_interval("figure", value)
    return x.median if x.low == x.high else {"median": x.median, "low": x.low, "high": x.high}


def quadratic_share(model: object, prompt_tokens: int) -> float:
    """The share of a prefill's FLOPs that grows with the square of its length."""
    work = roofline.prefill_work(model, prompt_tokens)
    return work["attention"].flops / total(work).flops


def least_number(holds: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The least n from 1 to `limit` for which `holds(n)`, for something that, once true, stays so.

    Raises ValueError if it does not hold at `limit`.
    """
    if not holds(limit):
        raise ValueError(f"does not hold up to {limit}")
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def ffn_compute_bound(model: object, peak: roofline.Peak, tokens: int, batch: int = 1) -> bool:
    """Whether the FFN, the largest part, has more FLOPs per byte than the machine's ridge."""
    return roofline.forward_work(model, tokens, batch=batch)["ffn"].intensity > peak.ridge
