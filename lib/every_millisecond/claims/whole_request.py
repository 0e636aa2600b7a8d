"""Claims about the whole request: its total, its two ends, the share of decode, and the people who wait for it."""

from __future__ import annotations

from every_millisecond.claims.arithmetic_claims import a_step_in_6_ms, decode_in_80_ms
from every_millisecond.claims.check import (
    A100,
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    MODEL,
    NOT_MEASURED,
    ClaimCheck,
    Figures,
    claim,
    least_number,
)
from every_millisecond.claims.published import PUBLISHED
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS
from llm_latency import roofline

ARTICLE_BEFORE = {"tokenise": 15, "prefill": 850, "decode": 980, "detokenise": 10}  # ms, article A
ARTICLE_AFTER = {"tokenise": 3, "prefill": 120, "decode": 80, "detokenise": 2}
ARTICLE_FACTOR = 1.87 / 0.21


@claim("A1", "a user who waits over 2 s for an explanation leaves in about 30% of cases")
def who_waits_leaves(here: Figures) -> ClaimCheck:
    return ClaimCheck(
        "nothing: it is about people, and no arithmetic bounds them",
        NOT_MEASURED,
        (
            "why: it takes users and their consent, and a service that is slow on purpose",
            "taken as the reason for the course, not as its result",
        ),
    )


@claim(
    "A2",
    f"1.87 s before, 0.21 s after six rounds ({ARTICLE_FACTOR:.1f} times), 7B on one A100",
    "speedup",
    "new_tokens",
    "perplexity_change",
    "baseline_ms",
    "best_ms",
)
def the_total(here: Figures) -> ClaimCheck:
    before, after = sum(ARTICLE_BEFORE.values()), sum(ARTICLE_AFTER.values())
    prefill_ms = roofline.predict_request(MODEL, roofline.gpu_peak(A100), prompt_tokens=256)["prefill"].ms
    eager, fastest = PUBLISHED["eager"].value, PUBLISHED["best"].value
    fit = int((210 - prefill_ms) * fastest / 1e3)
    claimed_tokens = 256
    if fit >= claimed_tokens:
        verdict = HOLDS
    else:
        verdict = CONDITION if fit >= 1 and decode_in_80_ms().verdict != HOLDS else IMPOSSIBLE
    measured = []
    if "speedup" in here:
        tokens = here.get("new_tokens", NEW_TOKENS)
        reached = here["speedup"] >= ARTICLE_FACTOR
        measured.append(
            f"{here['speedup']:.2f} times for {tokens:.0f} tokens, {'at least' if reached else 'below'} the claim's"
        )
    if "perplexity_change" in here:
        measured.append(f"perplexity {here['perplexity_change']:+.1%}")
    if "baseline_ms" in here and "best_ms" in here:
        measured.append(f"from {here['baseline_ms']:.0f} to {here['best_ms']:.0f} ms")
    return ClaimCheck(
        f"answers of up to {fit} tokens, at the best published rate; the claim's stages are for {claimed_tokens}",
        verdict,
        (
            f"its own stages add up to {before} and {after} ms: {before / after:.2f} times",
            f"the {claimed_tokens} tokens of A3: {decode_in_80_ms().verdict}",
            str(PUBLISHED["best"]),
            f"{NEW_TOKENS} tokens at {eager} tok/s take {NEW_TOKENS / eager:.2f} s, at {fastest} tok/s "
            f"{NEW_TOKENS / fastest:.2f} s: the course's request",
        ),
        tuple(measured),
    )


@claim(
    "A14",
    "tokenising and detokenising are under 2% of the total; caching the ids of common prompts helps",
    "ends_share",
    "ends_share_best",
    "lookup_share",
)
def the_two_ends(here: Figures) -> ClaimCheck:
    ends = {
        name: (stages["tokenise"] + stages["detokenise"]) / sum(stages.values())
        for name, stages in (("before", ARTICLE_BEFORE), ("after", ARTICLE_AFTER))
    }
    shares = {name: here[name] for name in ("ends_share", "ends_share_best") if name in here} or ends
    small = [share < 0.02 for share in shares.values()]
    verdict = HOLDS if all(small) else CONDITION if any(small) else IMPOSSIBLE
    words = {"ends_share": "of the baseline", "ends_share_best": "of the fastest rung"}
    measured = [f"{here[name]:.2%} {words[name]}" for name in words if name in here]
    if "lookup_share" in here:
        measured.append(f"cached ids save {here['lookup_share']:.3%} of the request")
    return ClaimCheck(
        "whatever is left when the model gets faster: the ends stay, and their share grows",
        verdict,
        tuple(f"the article's own figures, {name}: {share:.1%}" for name, share in ends.items()),
        tuple(measured),
    )


@claim(
    "B5", "decode is 97% of the total (512 tokens in, 256 out)", "decode_share_512_256", "decode_share", "new_tokens"
)
def decode_is_97_percent(here: Figures) -> ClaimCheck:
    peak, claimed = roofline.gpu_peak(A100), 0.965  # 97% as rounded

    def share(prompt: int, new: int) -> float:
        stages = roofline.predict_request(MODEL, peak, prompt_tokens=prompt, new_tokens=new)
        return stages["decode"].ms / (stages["decode"].ms + stages["prefill"].ms)

    least = least_number(lambda n: share(512, n + 1) >= claimed, limit=1 << 12) + 1
    shares = [here[name] for name in ("decode_share_512_256", "decode_share") if name in here]
    shares = shares or [share(512, 256), share(PROMPT_TOKENS, NEW_TOKENS)]
    if all(value >= claimed for value in shares):
        verdict = HOLDS
    else:
        verdict = CONDITION if least <= 256 or any(value >= claimed for value in shares) else IMPOSSIBLE
    tokens = here.get("new_tokens", NEW_TOKENS)
    request = "the standard request" if tokens == NEW_TOKENS else f"the standard prompt, {tokens:.0f} out"
    words = {"decode_share_512_256": "512 in, 256 out", "decode_share": request}
    return ClaimCheck(
        f"from {least} new tokens on after a prompt of 512, at the roof of an A100 (7B in BF16)",
        verdict,
        (
            f"the article's own rows: 1589 / (1589 + 46) = {1589 / (1589 + 46):.1%}, with the step of B4 "
            f"({a_step_in_6_ms().verdict})",
            f"at the roof: {share(512, 256):.1%} for 512 in and 256 out, {share(PROMPT_TOKENS, NEW_TOKENS):.1%} for "
            f"{PROMPT_TOKENS} in and {NEW_TOKENS} out, {share(512, 2):.1%} for 2 out",
        ),
        tuple(f"{here[name]:.1%}, {text}" for name, text in words.items() if name in here),
    )
