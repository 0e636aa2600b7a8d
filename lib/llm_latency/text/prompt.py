"""From a question to the ids that a model reads: chat template, special tokens once."""

from __future__ import annotations


def encode_prompt(tokenizer, text: str):
    """Ids of a text that already carries its chat template (list of int): no special token is added a second time.

    Raises TypeError for anything but text, ValueError for an empty one.
    """
    if not isinstance(text, str):
        raise TypeError(f"prompt={text!r} is a {type(text).__name__}; expected str")
    if not text:
        raise ValueError("the prompt is empty; expected at least one character")
    return token_ids(tokenizer, text)


def chat_text(tokenizer, question: str) -> str:
    """A user's question wrapped in the model's chat template, ready for `encode_prompt`."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )


def token_ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
