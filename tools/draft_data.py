"""The target's own answers, many at a time, with its feature at every token: what a draft is distilled from.

Compute-bound on a CPU, so everything is arranged for wide FP32 products: 64 questions of nearly the same length are
answered side by side, the shared system prompt is read once, and answers that have ended leave the batch. Each chunk is
written as one safetensors file, whole or not at all, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from draft_prompts import Question
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm_latency import sampling
from llm_latency.text.prompt import chat_text, encode_prompt

MIN_ROWS = 16  # below this an answer costs twice as much: chunks of left-overs are dropped in training


@dataclass(frozen=True, slots=True)
class Job:
    """One question to answer, greedily or by sampling at temperature 1."""

    ids: tuple[int, ...]
    sampled: bool
    kind: str


def plan(tokenizer, questions: list[Question], rows: int, rounds: int, seed: int) -> list[list[Job]]:
    """Chunks of up to `rows` jobs of similar length.

    A round asks every question once, half of them greedily; the second round asks again the other way about. Within a
    round the chunks come in random order, so that any beginning of the run is a fair sample of it.
    """
    chunks = []
    for number in range(rounds):
        jobs = [
            Job(tuple(encode_prompt(tokenizer, chat_text(tokenizer, q.text))), (i + number) % 2 == 1, q.kind)
            for i, q in enumerate(questions)
        ]
        jobs.sort(key=lambda job: len(job.ids))  # stable: the shuffled order stays within a length
        cut = [jobs[i : i + rows] for i in range(0, len(jobs), rows)]
        order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed + number))
        chunks += [cut[i] for i in order.tolist() if len(cut[i]) >= min(MIN_ROWS, rows)]
    return chunks


class BatchGenerator:
    """A Llama model in FP32 that answers many prompts in step. Its cache holds one chunk at a time."""

    def __init__(self, model, max_new_tokens: int, end: int) -> None:
        config = model.config
        self.max_new_tokens, self.end = max_new_tokens, end
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            model.model.layers[0].self_attn.head_dim,
        )
        self.eps, self.rotary = config.rms_norm_eps, model.model.rotary_emb
        self.embedding = model.model.embed_tokens.weight.detach()
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                (
                    layer.input_layernorm.weight.detach(),
                    product(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
                    product(attention.o_proj.weight),
                    layer.post_attention_layernorm.weight.detach(),
                    product(mlp.gate_proj.weight, mlp.up_proj.weight),
                    product(mlp.down_proj.weight),
                )
            )
        self.norm = model.model.norm.weight.detach()
        self.head = product(model.lm_head.weight)

    @torch.inference_mode()
    def answer(self, jobs: list[Job], generator: torch.Generator) -> dict[str, Tensor]:
        """Answer a chunk. Returns, for b jobs of up to n tokens each, right-padded:

        tokens int32 [b, n]; features BF16 [b, n, hidden], the target's after its final norm, zero behind each end;
        prompt_lengths and lengths int32 [b]; sampled bool [b]. A text's last token was never read by the target: the
        feature there is zero too.
        """
        ids = [job.ids for job in jobs]
        shared = common_prefix(ids)
        lengths = torch.tensor([len(row) for row in ids])
        pads = lengths.max() - lengths  # [b] hidden slots between the shared prefix and the rest
        width = int(lengths.max())
        total = width + self.max_new_tokens
        hidden = self.embedding.shape[1]
        count = len(jobs)

        # Slot space: prefix, pads, rest of the prompt, answer. One row of tokens and features per job.
        slots = torch.zeros(count, total, dtype=torch.int64)
        features = torch.zeros(count, total, hidden, dtype=torch.bfloat16)
        for row, (tokens, pad) in enumerate(zip(ids, pads.tolist(), strict=True)):
            slots[row, :shared] = torch.tensor(tokens[:shared])
            slots[row, shared + pad : width] = torch.tensor(tokens[shared:])
        visible = torch.ones(count, total, dtype=torch.bool)
        columns = torch.arange(total)
        visible[(columns >= shared) & (columns < shared + pads[:, None])] = False
        positions = (columns - pads[:, None]).clamp_(min=0)  # [b, total]
        positions[:, :shared] = columns[:shared]
        cos, sin = self.rotary(torch.zeros(1), positions)  # each [b, total, head_dim]
        half = self.head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        visible = visible if bool(pads.any()) else None

        def table(rows: Tensor | slice, start: int, end: int) -> tuple[Tensor, Tensor]:
            return cos[rows, None, start:end], sin[rows, None, start:end]

        caches = [torch.zeros(2, count, self.kv_heads, total, self.head_dim) for _ in self.layers]
        if shared:
            # One row reads the shared prefix; all rows get its keys and values.
            row = slice(0, 1)
            f = self._forward(slots[row, :shared], caches, row, 0, table(row, 0, shared), None)
            features[:, :shared] = f.bfloat16()
            for cache in caches:
                cache[:, 1:, :, :shared] = cache[:, :1, :, :shared]
        everyone = slice(None)
        f = self._forward(slots[:, shared:width], caches, everyone, shared, table(everyone, shared, width), visible)
        features[:, shared:width] = f.bfloat16()
        last = f[:, -1]  # [b, hidden]

        active = torch.arange(count)
        ends = torch.full((count,), total)  # slot behind the last token
        sampled = torch.tensor([job.sampled for job in jobs])
        for slot in range(width, total):
            chosen = self._choose(self.head(last), sampled[active], generator)
            slots[active, slot] = chosen
            done = (chosen == self.end) & (ends[active] == total)
            ends[active[done]] = slot + 1
            alive = ends[active] == total
            if slot + 1 == total or not bool(alive.any()):
                break
            if int(alive.sum()) <= 0.95 * len(active):  # moving the cache pays within a step or two
                active = active[alive]
                caches = [cache[:, alive] for cache in caches]
            mask = None if visible is None else visible[active]
            tables = table(active, slot, slot + 1)
            last = self._forward(slots[active, slot : slot + 1], caches, everyone, slot, tables, mask)[:, 0]
            features[active, slot] = last.bfloat16()
        return _right_padded(slots, features, shared, pads, lengths, ends, sampled)

    def _choose(self, logits: Tensor, sampled: Tensor, generator: torch.Generator) -> Tensor:
        """One token per row of logits [b, vocab]: the largest, or drawn where `sampled` [b]: int64 [b]."""
        chosen = logits.argmax(dim=-1)
        if bool(sampled.any()):
            chosen[sampled] = sampling.sample(logits[sampled].softmax(dim=-1), generator)
        return chosen

    def _forward(self, ids: Tensor, caches: list[Tensor], rows: slice, start: int, tables, visible) -> Tensor:
        """Read ids [b, k] at slots start.. of the caches' rows; features [b, k, hidden] after the final norm.

        tables: cos and sin [b, 1, k, head_dim]. visible: bool [b, total], or None if no slot is hidden.
        """
        batch, tokens = ids.shape
        end = start + tokens
        cos, sin = tables
        mask = None
        if tokens > 1:
            mask = torch.ones(tokens, end, dtype=torch.bool).tril(start)[None, None]
        if visible is not None:
            seen = visible[:, None, None, :end]
            # A hidden slot sees itself, or its softmax would have nothing to divide by.
            mask = seen if mask is None else (mask & seen) | torch.eye(end, dtype=torch.bool)[start:]
        x = self.embedding[ids]  # [b, k, hidden]
        for (norm1, qkv, output, norm2, gate_up, down), cache in zip(self.layers, caches, strict=True):
            y = qkv(self._norm(x, norm1)).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            qk, v = y.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
            q, k = qk.split((self.heads, self.kv_heads), dim=1)
            cache[0, rows, :, start:end] = k
            cache[1, rows, :, start:end] = v
            keys, values = cache[0, rows, :, :end], cache[1, rows, :, :end]
            if tokens == 1:  # the heads of one group are rows of one problem
                q = q.reshape(batch, self.kv_heads, -1, self.head_dim)
                y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
                y = y.reshape(batch, 1, -1)
            else:
                y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
                y = y.transpose(1, 2).reshape(batch, tokens, -1)
            x = x + output(y)
            gate, up = gate_up(self._norm(x, norm2)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def common_prefix(rows: list[tuple[int, ...]]) -> int:
    """How many ids all rows begin with, at most one less than the shortest has."""
    count = 0
    for column in zip(*(row[:-1] for row in rows), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def product(*weights: Tensor):
    """A function that multiplies rows by the weights [out, in], fused; in oneDNN's layout, faster for 64 rows."""
    weight = torch.cat([w.detach().float() for w in weights])
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _right_padded(slots, features, shared, pads, lengths, ends, sampled) -> dict[str, Tensor]:
    """Take the hidden slots out of the middle: every row begins at 0 and its padding stands at the end."""
    count = slots.shape[0]
    kept = (ends - pads).tolist()
    tokens = torch.zeros(count, max(kept), dtype=torch.int32)
    moved = torch.zeros(count, max(kept), features.shape[2], dtype=torch.bfloat16)
    for row, (pad, length) in enumerate(zip(pads.tolist(), kept, strict=True)):
        for source, into in ((slots, tokens), (features, moved)):
            into[row, :shared] = source[row, :shared]
            into[row, shared:length] = source[row, shared + pad : length + pad]
        moved[row, length - 1] = 0  # a row that ended may have been fed its last token, one that did not was not
    return {
        "tokens": tokens,
        "features": moved,
        "prompt_lengths": lengths.int(),
        "lengths": torch.tensor(kept, dtype=torch.int32),
        "sampled": sampled,
    }


def chunk_path(folder: Path, index: int) -> Path:
    """Where chunk `index` lies, or will lie."""
    return folder / f"chunk-{index:05d}.safetensors"


def write_chunk(path: Path, data: dict[str, Tensor], kinds: list[str], seconds: float) -> None:
    """Write one chunk, and what CPU time it took, so that a reader, or a crash, sees all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}.part")
    save_file(
        {k: v.contiguous() for k, v in data.items()},
        part,
        metadata={"kinds": json.dumps(kinds), "seconds": f"{seconds:.1f}"},
    )
    os.replace(part, path)


def generate(
    make_generator, chunks: list[list[Job]], folder: Path, seed: int, mine=lambda index: True
) -> Iterator[int]:
    """Answer every chunk that is mine and not yet in the folder; yield the new tokens of each.

    A chunk's random numbers depend on the seed and its index alone, so a run that was interrupted, or is shared by
    several processes, draws what an unbroken one would.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine = None
    for index, jobs in enumerate(chunks):
        if not mine(index) or chunk_path(folder, index).exists():
            continue
        engine = engine or make_generator()
        start = time.process_time()  # of this process alone: the run may be stopped, or share its core
        data = engine.answer(jobs, torch.Generator().manual_seed(seed * 1_000_003 + index))
        seconds = time.process_time() - start
        write_chunk(chunk_path(folder, index), data, [job.kind for job in jobs], seconds)
        yield int((data["lengths"] - data["prompt_lengths"]).sum())


def read_chunks(folder: Path) -> list[dict[str, Tensor]]:
    """All chunks in the folder in order; beside the tensors "kinds", one a question, and "seconds" of CPU time."""
    chunks = []
    for path in sorted(folder.glob("chunk-*.safetensors")):
        data = load_file(path)
        with safe_open(path, "pt") as file:
            facts = file.metadata()
        data["kinds"], data["seconds"] = json.loads(facts["kinds"]), float(facts.get("seconds", "nan"))
        chunks.append(data)
    return chunks
