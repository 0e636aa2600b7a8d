"""`respond`: one prompt answered from text to text, with every millisecond put to a stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.generation import Stepper
from llm_latency.text import StreamingDetokenizer
from llm_latency.text.prompt import encode_prompt
from llm_latency.timing import LatencyBreakdown, LatencyTimer


@dataclass(frozen=True, slots=True)
class Response:
    """One answered request: its text, its ids [1, prompt + new], and where the time went."""

    text: str
    sequences: Tensor
    breakdown: LatencyBreakdown


def respond(
    stepper: Stepper,
    tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    timer: LatencyTimer | None = None,
    **options,
) -> Response:
    """Answer one prompt, greedily unless told otherwise, with every millisecond put to a stage.

    prompt: text that already carries its chat template (`request.chat_text`). Further keyword arguments go to the
    stepper's `generate`: temperature, top_k, top_p, eos_token_id, generator.

    Raises TypeError or ValueError for a prompt that is not text, is empty, or does not fit the model.
    """
    timer = timer or LatencyTimer(device=stepper.device)
    timer.reset()
    timer.mark_start("total")
    with timer.stage("tokenise"):
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
    output = stepper.generate(ids, max_new_tokens, timer=timer, **options)
    with timer.stage("detokenise"):
        detokenizer = StreamingDetokenizer(tokenizer)
        new = output.sequences[0, ids.shape[1] :].tolist()
        text = "".join(detokenizer.push(token) for token in new) + detokenizer.finish()
    timer.mark_end("total")
    breakdown = LatencyBreakdown(
        tokenize_ms=timer.get_elapsed_ms("tokenise"),
        prefill_ms=timer.get_elapsed_ms("prefill"),
        decode_ms=timer.get_elapsed_ms("decode"),
        detokenize_ms=timer.get_elapsed_ms("detokenise"),
        total_ms=timer.get_elapsed_ms("total"),
        prompt_tokens=ids.shape[1],
        tokens_generated=len(new),
    )
    return Response(text, output.sequences, breakdown)
