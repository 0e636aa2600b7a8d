"""A tokenizer of letters with the manners of a real one: special tokens, a chat template, a vocabulary of its own."""

from __future__ import annotations


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
