"""The two kinds of draft, how they are trained on the target's answers, and how well the target accepts them.

Both learn by forward KL: the teacher is the target's own distribution at every answer token, rebuilt from its stored
feature and cut to the restricted head. A plain draft is a small Llama that starts as the target's first layers. A
conditioned one is a `FeatureLayer`; late in its training it also reads its own predictions, as it must when it drafts
more than one token (EAGLE-3, arXiv 2503.01840; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from llm_latency.hardware import bf16_is_native
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape

DAMPING = 0.1  # of a plain draft's o_proj and down_proj at the start: layers cut off their model begin by saying little
# Of the final norm at the start: a beginner's guess should not sound as sure as the target's.
PLAIN_DOUBT, CONDITIONED_DOUBT = 0.15, 0.5
GUESS_TOKENS = 20_000
NORM_RATE = 5.0  # learning rate of norm weights over that of matrices
REGRESSION = 0.1  # weight of the feature's own error beside the KL, for conditioned drafts


class PlainStudent(nn.Module):
    """The target's first layers and final norm; embedding and head stay the target's."""

    def __init__(self, target: LlamaForCausalLM, layers: int) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = layers
        self.embedding = [target.model.embed_tokens.weight.detach()]  # in a list: not ours to train or store
        self.model = type(target.model)(config)
        self.model.embed_tokens = None
        ours = {k: v for k, v in target.model.state_dict().items() if k in self.model.state_dict()}
        self.model.load_state_dict(ours)
        with torch.no_grad():
            for layer in self.model.layers:
                layer.self_attn.o_proj.weight.mul_(DAMPING)
                layer.mlp.down_proj.weight.mul_(DAMPING)
            self.model.norm.weight.mul_(PLAIN_DOUBT)

    def predict(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Features [b, n, hidden] from tokens [b, n]: one forward serves every step of a draft."""
        embeddings = self.embedding[0][tokens]
        return [self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state] * steps


class ConditionedStudent(nn.Module):
    """A FeatureLayer. It starts as the best linear guess at the next feature; attention and FFN begin as the target's
    last, with silent outputs.

    Without that guess it would begin by naming, with great confidence, the token that it has just been told.
    """

    def __init__(self, target: LlamaForCausalLM, head_ids: Tensor, chunks: list[dict], source: int = -1) -> None:
        super().__init__()
        self.embedding = [target.model.embed_tokens.weight.detach()]
        self.layer = FeatureLayer(FeatureShape.of_config(target.config), head_ids)
        theirs = target.model.layers[source]
        attention, mlp = theirs.self_attn, theirs.mlp
        final = target.model.norm.weight.detach()
        with torch.no_grad():
            self.layer.join.weight.copy_(linear_guess(self.embedding[0], final, chunks))
            self.layer.attention_norm.copy_(theirs.input_layernorm.weight)
            self.layer.qkv.weight.copy_(
                torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
            )
            self.layer.output.weight.zero_()
            self.layer.ffn_norm.copy_(theirs.post_attention_layernorm.weight)
            self.layer.gate_up.weight.copy_(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
            self.layer.down.weight.zero_()
            self.layer.out_norm.copy_(final * CONDITIONED_DOUBT)

    def predict(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Features of every position [b, n, hidden], once for each step of a draft.

        Entry j holds, at position p, the prediction that has seen the target's features up to p - 1 - j and its own
        ones after that, with the true tokens: all drafts of j + 1 tokens at once, each starting at another position.
        Position 0 and what a draft could not reach is filled with the target's feature.
        """
        embeddings = self.embedding[0][tokens[:, 1:]]
        positions = torch.arange(tokens.shape[1] - 1)
        cache = RolloutCache()
        seen = features[:, :-1]
        outputs = []
        for _ in range(steps):
            predicted = self.layer(embeddings, seen, positions, cache)  # index t predicts the feature of t + 1
            outputs.append(torch.cat((features[:, :1], predicted), dim=1))
            seen = outputs[-1][:, :-1]
        return outputs


def linear_guess(embedding: Tensor, final: Tensor, chunks: list[dict]) -> Tensor:
    """The matrix [hidden, 2 * hidden] that best takes the normalised embedding of token t + 1 and feature of token t
    to the target's normalised hidden state of token t + 1; least squares with a little ridge, over GUESS_TOKENS."""

    def normalise(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])

    hidden = embedding.shape[1]
    square, cross, count = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden), 0
    for chunk in chunks:
        for row, length in enumerate(chunk["lengths"].tolist()):
            if count > GUESS_TOKENS:
                break
            features = chunk["features"][row, : length - 1].float()
            token = embedding[chunk["tokens"][row, 1 : length - 1].long()]
            x = torch.cat((normalise(token), normalise(features[:-1])), dim=-1)  # [n, 2 * hidden]
            square += x.t() @ x
            cross += x.t() @ normalise(features[1:] / final)
            count += len(x)
    ridge = 0.01 * square.diagonal().mean() * torch.eye(2 * hidden)
    return torch.linalg.solve(square + ridge, cross).t()


class RolloutCache:
    """Keys and values of all steps of all drafts side by side, each draft seeing its own.

    Step j at index t sees the first step's keys up to t - j, where the target's features were known, and of each later
    step i the one key at t - (j - i) that belongs to the same draft.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `FeatureCache.extend`, for the next step of the same positions."""
        self.keys.append(keys)
        self.values.append(values)
        step, tokens = len(self.keys) - 1, keys.shape[2]
        every = torch.ones(tokens, tokens, dtype=torch.bool)
        blocks = [every.tril(-step)] + [every.tril(i - step) & every.triu(i - step) for i in range(1, step + 1)]
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2), torch.cat(blocks, dim=1)


# -- data ---------------------------------------------------------------------------------------------------------


def frequent_ids(chunks: list[dict], count: int, end: int) -> tuple[Tensor, float]:
    """The `count` ids that occur most often in the answers, rising, the end of text among them; and the share of
    answer tokens that they cover."""
    tokens = torch.cat([chunk["tokens"][_answers(chunk)] for chunk in chunks]).long()
    counts = tokens.bincount(minlength=end + 1)
    counts[end] = counts.max() + 1
    top = counts.argsort(descending=True, stable=True)[: min(count, int((counts > 0).sum()))]
    return top.sort().values, float(torch.isin(tokens, top).float().mean())


def _answers(chunk: dict) -> Tensor:
    """Which tokens [b, n] are the target's own."""
    columns = torch.arange(chunk["tokens"].shape[1])
    return (columns >= chunk["prompt_lengths"][:, None]) & (columns < chunk["lengths"][:, None])


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens int64 [b, n], features FP32 [b, n, hidden], known bool [b, n]: the next token is an answer's."""

    tokens: Tensor
    features: Tensor
    known: Tensor


def _batch(chunk: dict, rows: Tensor) -> Batch:
    width = int(chunk["lengths"][rows].max())
    tokens, features = chunk["tokens"][rows, :width].long(), chunk["features"][rows, :width].float()
    columns = torch.arange(width)
    lengths, prompts = chunk["lengths"][rows, None], chunk["prompt_lengths"][rows, None]
    return Batch(tokens, features, (columns >= prompts - 1) & (columns < lengths - 1))


def batches(chunks: list[dict], size: int, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch in random order. A batch comes from one chunk, whose texts are about equally long."""
    jobs = []
    for index, chunk in enumerate(chunks):
        jobs += [(index, rows) for rows in torch.randperm(len(chunk["lengths"]), generator=generator).split(size)]
    for i in torch.randperm(len(jobs), generator=generator).tolist():
        yield _batch(chunks[jobs[i][0]], jobs[i][1])


# -- Muon ---------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is made orthogonal (Jordan et al. 2024), sized like one of Adam's (Liu et al. 2025,
    arXiv 2502.16982). PyTorch's own always rounds to BF16, which a CPU without BF16 instructions does 30x slower."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(average, group["momentum"])
                with products_in_bf16():
                    update = orthogonal(ahead)
                p.add_(update, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"])


def products_in_bf16() -> torch.autocast:
    """Autocast where the CPU multiplies BF16 itself: training takes less than half the time. Elsewhere: no change."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bf16_is_native("cpu"))


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix to [m, n], roughly: five Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.t() if tall else x


# -- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """steps: of a draft, trained from the share `rollout_from` of the run on.

    minutes: if the clock runs out before the epochs, the schedule is driven by it and ends with it; None: never. Such a
    run cannot be repeated to the bit.
    """

    epochs: float = 3.0
    batch: int = 8
    lr: float = 5e-3
    steps: int = 1
    rollout_from: float = 0.6
    seed: int = 3
    minutes: float | None = None


def loss_of(student: nn.Module, batch: Batch, head_rows: Tensor, steps: int) -> Tensor:
    """Mean KL from the target to the student over known positions, averaged over a draft's steps; plus, for
    conditioned drafts, the error of the predicted feature."""
    teacher = F.linear(batch.features[batch.known], head_rows).log_softmax(dim=-1)  # [m, v]
    total = 0.0
    for predicted in student.predict(batch.tokens, batch.features, steps):
        mine = predicted[batch.known]
        logits = F.linear(mine, head_rows).log_softmax(dim=-1)
        total = total + F.kl_div(logits, teacher, log_target=True, reduction="batchmean")
        if isinstance(student, ConditionedStudent):
            truth = batch.features[batch.known]
            total = total + REGRESSION * (mine - truth).square().mean() / truth.square().mean()
    return total / steps


@torch.enable_grad()
def train(
    student: nn.Module,
    chunks: list[dict],
    head_rows: Tensor,
    options: TrainOptions,
    report: Callable[[int, float, float], None],
) -> None:
    """Train in place. `report(tokens seen, CPU seconds, loss)` is called at 1/8, 1/4, 1/2, 3/4 and the end.

    Muon (Jordan et al. 2024) for matrices, AdamW for norms, both with a cosine down to zero.
    """
    torch.manual_seed(options.seed)
    matrices = [p for p in student.parameters() if p.dim() == 2]
    norms = [p for p in student.parameters() if p.dim() == 1]
    optimisers = [Muon(matrices, options.lr), torch.optim.AdamW(norms, lr=NORM_RATE * options.lr, weight_decay=0.0)]
    rates = [options.lr, NORM_RATE * options.lr]
    generator = torch.Generator().manual_seed(options.seed)
    per_epoch = sum(-(-len(chunk["lengths"]) // options.batch) for chunk in chunks)
    total = max(1, round(options.epochs * per_epoch))
    marks = [0.125, 0.25, 0.5, 0.75, 1.0]
    began = time.monotonic()

    def share_done() -> float:
        clock = (time.monotonic() - began) / (60 * options.minutes) if options.minutes else 0.0
        return min(1.0, max(done / total, clock))

    # Autocast leaves the norms' weights in FP32, for which PyTorch only has its slower kernel.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    seen, done, spent, recent = 0, 0, 0.0, []
    student.train()
    while marks:
        for batch in batches(chunks, options.batch, generator):
            start = time.process_time()
            share = share_done()
            factor = min(1.0, (done + 1) / 10) * 0.5 * (1 + math.cos(math.pi * share))
            for optimiser, rate in zip(optimisers, rates, strict=True):
                for group in optimiser.param_groups:
                    group["lr"] = rate * factor
            steps = options.steps if share >= options.rollout_from else 1
            with products_in_bf16():
                loss = loss_of(student, batch, head_rows, steps)
            loss.backward()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            seen += int(batch.known.sum())
            recent = [*recent[-19:], float(loss.detach())]
            done += 1
            spent += time.process_time() - start
            if done % 10 == 0:
                print(
                    f"step {done}/{total}: {seen} tokens, {spent:.0f} s, loss {sum(recent) / len(recent):.4f}",
                    flush=True,
                )
            if share_done() >= marks[0]:
                while marks and share_done() >= marks[0]:
                    marks.pop(0)
                student.eval()
                report(seen, spent, sum(recent) / len(recent))
                student.train()
            if not marks:
                break
    student.eval()
