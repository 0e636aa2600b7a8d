"""The drafts that ship with the package for the bundled target: only their own layers, as safetensors.

`tools/distil_draft.py` made them; docs/draft_model_card.md says from what, and how well the target accepts them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FOLDER = Path(__file__).resolve().parents[1] / "data" / "drafts"
PLAIN, CONDITIONED = "plain", "conditioned"


def draft_path(name: str) -> Path:
    """Where a shipped draft lies: "plain" or "conditioned"."""
    if name not in (PLAIN, CONDITIONED):
        raise ValueError(f"draft {name!r}; expected {PLAIN!r} or {CONDITIONED!r}")
    path = FOLDER / f"{name}.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the package was installed without its data; install it again")
    return path


@functools.cache
def draft_facts(name: str) -> dict[str, str]:
    """What a shipped draft's file says of itself: its target, its licence, its number of layers."""
    with safe_open(draft_path(name), "pt") as file:
        return dict(file.metadata())


def draft_tensors(name: str) -> dict[str, Tensor]:
    """A shipped draft's tensors: its own layers in BF16, and `head_ids` int64 [v]."""
    with safe_open(draft_path(name), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def frequent_ids(name: str = PLAIN) -> Tensor:
    """int64 [v], rising: the target's ids that a shipped draft was trained to name.

    A head cut down to these rows is a fraction of the work. Every other id then has draft probability 0, which the
    acceptance rule handles: the output's distribution stays the target's.
    """
    with safe_open(draft_path(name), "pt") as file:
        return file.get_tensor("head_ids")


def load_plain(place: str, dtype: torch.dtype) -> PreTrainedModel:
    """The plain draft on the CPU: a Llama of a few layers with the embedding and head of the target in `place`."""
    ours = draft_tensors(PLAIN)
    del ours["head_ids"]
    config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    config.num_hidden_layers = int(draft_facts(PLAIN)["layers"])
    # It leaves the target's other layers out on purpose; `loading` keeps transformers from listing them.
    model = AutoModelForCausalLM.from_pretrained(
        place,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    kept = set(model.state_dict()) - set(ours)
    if kept != {"model.embed_tokens.weight", "lm_head.weight"}:
        raise ValueError(f"{draft_path(PLAIN)} does not fit its target: it leaves {sorted(kept)} as they are")
    model.load_state_dict(ours, strict=False)
    return model
