"""Claims about the whole request: its total, its two ends, the share of decode, and the people who wait for it."""

from __future__ import annotations

from every_millisecond.claims.arithmetic_claims import (
    NEW_TOKENS,
    a_step_in_6_ms,
    decode_in_80_ms,
    least_decode_ms,
    prefill_ms,
)
from every_millisecond.claims.check import (
    A100,
    INFINITY,
    MODEL,
    ON_A100,
    SEVEN_B,
    Arithmetic,
    Need,
    Part,
    claim,
    least_number,
)
from every_millisecond.claims.published import PUBLISHED
from every_millisecond.request import NEW_TOKENS as OUR_TOKENS
from every_millisecond.request import PROMPT_TOKENS
from llm_latency import roofline

ARTICLE_BEFORE = {"tokenise": 15, "prefill": 850, "decode": 980, "detokenise": 10}  # ms, article A
ARTICLE_AFTER = {"tokenise": 3, "prefill": 120, "decode": 80, "detokenise": 2}
ARTICLE_FACTOR = 1.87 / 0.21


@claim(
    "A1",
    "a user who waits over 2 s for an explanation leaves in about 30% of cases",
    Part("left_share", "{v} of those who waited over 2 s left", 0.25, 0.35, form=".0%"),
    needs=(Need("users", "people who wait, a hundred or more", 100, INFINITY),),
)
def who_waits_leaves() -> Arithmetic:
    return Arithmetic(
        "says nothing",
        "it is about people, and no arithmetic bounds them",
        (
            "why the course does not measure it: it takes users, their consent, and a service that is slow on purpose",
            "taken as the reason for the course, not as its result",
        ),
    )


@claim(
    "A2",
    f"1.87 s before, 0.21 s after six rounds ({ARTICLE_FACTOR:.1f} times), 7B on one A100",
    Part("best_ms", "the fastest request takes {v}", high=215, form=",.0f ms"),
    Part("speedup", "the request took {v} as long before", 8.85, same=1),
    needs=(SEVEN_B, ON_A100, Need("new_tokens", "256 new tokens", NEW_TOKENS, NEW_TOKENS)),
    notes={
        "baseline_ms": "from {v:,.0f} ms",
        "perplexity_change": "perplexity {v:+.1%}",
        "tokens_per_pass": "{v:.1f} tokens a pass",
    },
    contains=("A3",),
    physics={"best_ms": lambda here: (prefill_ms(256) + least_decode_ms(here), INFINITY)},
)
def the_total() -> Arithmetic:
    before, after = sum(ARTICLE_BEFORE.values()), sum(ARTICLE_AFTER.values())
    eager, fastest = PUBLISHED["eager"].value, PUBLISHED["best"].value
    fit = int((210 - prefill_ms(256)) * fastest / 1e3)
    return Arithmetic(
        "possible" if fit >= NEW_TOKENS else "only if" if fit >= 1 else "impossible",
        f"the answer has {fit} tokens or fewer (at the best published rate)",
        (
            f"its own stages add up to {before} and {after} ms: {before / after:.2f} times",
            f"the {NEW_TOKENS} tokens of A3: {decode_in_80_ms.arithmetic().word}",
            f"at the best published rate {max(fit, 0)} tokens fit into 210 ms; {PUBLISHED['best']}",
            f"{OUR_TOKENS} tokens at {eager} tok/s take {OUR_TOKENS / eager:.2f} s, at {fastest} tok/s "
            f"{OUR_TOKENS / fastest:.2f} s: the course's request",
        ),
    )


@claim(
    "A14",
    "tokenising and detokenising are under 2% of the total; caching the ids of common prompts helps",
    Part("ends_share", "tokenising and detokenising take {v} of the request", high=0.02, form=".2%"),
    Part("ends_share_best", "they take {v} of the fastest request", high=0.02, needed=False, form=".2%"),
    # Whether it helps is two questions: does looking the ids up save time at all, and would anybody notice?
    Part("lookup_share", "looking up kept ids saves {v} of the request", 0, same=0, form=".2%"),
    Part("noticed", "the saving is {v} of what requests differ by anyway", 1, form=".1%"),
)
def the_two_ends() -> Arithmetic:
    ends = {
        name: (stages["tokenise"] + stages["detokenise"]) / sum(stages.values())
        for name, stages in (("before", ARTICLE_BEFORE), ("after", ARTICLE_AFTER))
    }
    return Arithmetic(
        "possible" if max(ends.values()) < 0.02 else "only if",
        "the rest of the request takes 49 times as long as its two ends, whose share grows as the model gets faster",
        tuple(f"the article's own figures, {name}: {share:.1%}" for name, share in ends.items()),
    )


@claim(
    "B5",
    "decode is 97% of the total (512 tokens in, 256 out)",
    Part(
        "decode_share_512_256",
        "with 512 tokens in and 256 out decode is {v} of prefill and decode",
        0.96,
        0.98,
        tolerance=0.01,
        form=".1%",
    ),
    notes={"decode_share": "{v:.1%} of the standard prompt's request", "new_tokens": "with {v:.0f} tokens out"},
    setting="512 tokens in, 256 out",
)
def decode_is_97_percent() -> Arithmetic:
    peak, claimed = roofline.gpu_peak(A100), 0.96

    def share(prompt: int, new: int) -> float:
        stages = roofline.predict_request(MODEL, peak, prompt_tokens=prompt, new_tokens=new)
        return stages["decode"].ms / (stages["decode"].ms + stages["prefill"].ms)

    least = least_number(lambda n: share(512, n + 1) >= claimed, limit=1 << 12) + 1
    return Arithmetic(
        "only if" if least <= 256 else "impossible",
        f"the answer has {least} tokens or more after a prompt of 512, at the roof of an A100 (7B in BF16)",
        (
            f"the article's own rows: 1589 / (1589 + 46) = {1589 / (1589 + 46):.1%}, with the step of B4 "
            f"({a_step_in_6_ms.arithmetic().word})",
            f"at the roof: {share(512, 256):.1%} for 512 in and 256 out, {share(PROMPT_TOKENS, OUR_TOKENS):.1%} for "
            f"{PROMPT_TOKENS} in and {OUR_TOKENS} out, {share(512, 2):.1%} for 2 out",
        ),
    )
