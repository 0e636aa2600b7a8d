"""Whether a draft may guess for a target at all: told at construction, not by a wrong token later."""

from __future__ import annotations

PADDING = 128  # ids: vocabularies of one family are padded to different multiples, by no more than this


def check_devices(target, draft) -> None:
    """Raise ValueError unless draft and target share a device. Their dtypes may differ: both are compared in FP32."""
    if draft.device is not None and draft.device != target.device:
        raise ValueError(f"the draft is on {draft.device} and the target on {target.device}; expected one device")


def check_sizes(target, draft) -> None:
    """Raise ValueError unless both vocabularies have one size, but for a padded tail: all that sizes can tell."""
    if draft.vocab_size is not None and abs(draft.vocab_size - target.vocab_size) > PADDING:
        raise ValueError(
            f"the draft's vocabulary has {draft.vocab_size} ids and the target's {target.vocab_size}; expected the "
            f"same vocabulary, but for a padded tail of up to {PADDING} ids"
        )


def check_tokenizers(target_tokenizer, draft_tokenizer) -> None:
    """Raise ValueError if an id means one token to the target and another to the draft.

    An id that only one of them knows is harmless: the draft then never proposes it, or the target never accepts it.
    """
    meanings = {i: token for token, i in target_tokenizer.get_vocab().items()}
    for token, i in sorted(draft_tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if meanings.get(i, token) != token:
            raise ValueError(
                f"id {i} is {meanings[i]!r} to the target and {token!r} to the draft; expected one meaning"
            )
