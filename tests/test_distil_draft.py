"""tools/distil_draft.py: questions, answers, training and counting, on a toy target."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import draft_card
import draft_data
import draft_eval
import draft_prompts
import draft_train


@pytest.fixture(scope="module")
def toy():
    """A random Llama whose end-of-text (id 2) comes up now and then."""
    torch.manual_seed(3)
    sizes = dict(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2)
    config = LlamaConfig(
        vocab_size=61, num_hidden_layers=3, max_position_embeddings=256, tie_word_embeddings=False, **sizes
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return model


def jobs(count: int, seed: int = 0) -> list[draft_data.Job]:
    generator = torch.Generator().manual_seed(seed)
    prefix = (5, 6, 7)
    return [
        draft_data.Job(
            prefix + tuple(torch.randint(8, 60, (2 + i % 4,), generator=generator).tolist()), i % 2 == 1, "chat"
        )
        for i in range(count)
    ]


def answer(toy, count: int = 10, new: int = 12):
    engine = draft_data.BatchGenerator(toy, new, end=2)
    return engine.answer(jobs(count), torch.Generator().manual_seed(1))


# -- questions ----------------------------------------------------------------------------------------------------


def test_held_out_topics_share_nothing_with_training():
    """Acceptance measured on a topic that was trained on says nothing about a learner's own question."""
    for kind in draft_prompts.TEMPLATES:
        ours, theirs = (draft_prompts.topics(kind, held_out) for held_out in (False, True))
        assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
        assert all(ours) and all(theirs)
        assert not set(ours) & set(theirs)
    training = [q.text for q in draft_prompts.questions(held_out=False)]
    for kind in draft_prompts.TEMPLATES:
        for topic in draft_prompts.topics(kind, held_out=True):
            assert not [text for text in training if topic in text], topic


def test_the_standard_request_is_held_out():
    """The ladder's own problem was in the training set: its speed-up would be that of a draft that knows the answer."""
    from every_millisecond import request

    code = request._SOLUTION.split("\n", 1)[1].split("(")[0]
    assert not [
        q for q in draft_prompts.questions(held_out=False) if code in q.text or "two numbers that add" in q.text
    ]
    assert [q for q in draft_prompts.questions(held_out=True) if code in q.text]


def test_questions_are_many_distinct_and_in_a_fixed_order():
    """A draw that changes from run to run would make an interrupted run mix two plans."""
    first, second = draft_prompts.questions(held_out=False), draft_prompts.questions(held_out=False)
    assert first == second
    assert len({q.text for q in first}) == len(first) > 5000


# -- answers ------------------------------------------------------------------------------------------------------


def test_greedy_answers_and_features_are_those_of_the_model(toy):
    """Left padding, the shared prefix, or rows that leave the batch shifted a position: the teacher would be noise."""
    data = answer(toy, count=10, new=24)
    ended = 0
    for row, job in enumerate(jobs(10)):
        n, prompt = int(data["lengths"][row]), int(data["prompt_lengths"][row])
        tokens = data["tokens"][row, :n].long()
        assert tuple(tokens[:prompt].tolist()) == job.ids
        with torch.no_grad():
            hidden = toy.model(tokens[None]).last_hidden_state[0]
        torch.testing.assert_close(data["features"][row, : n - 1].float(), hidden[: n - 1], rtol=0.01, atol=0.01)
        assert not data["features"][row, n - 1 :].any() and not data["tokens"][row, n:].any()
        if not job.sampled:
            assert torch.equal(toy.lm_head(hidden[prompt - 1 : n - 1]).argmax(-1), tokens[prompt:])
        assert 2 not in tokens[prompt:-1].tolist(), "an answer goes on behind its end"
        ended += int(tokens[-1]) == 2
        assert int(tokens[-1]) == 2 or n == prompt + 24
    assert 0 < ended < 10, "the toy must show both kinds of ending"


def test_an_interrupted_run_continues_where_it_stopped(toy, tmp_path):
    """A killed run began again from nothing, or a half-written chunk was taken for a whole one."""

    def make():
        return draft_data.BatchGenerator(toy, 6, end=2)

    chunks = [jobs(6, seed) for seed in range(3)]
    whole = tmp_path / "whole"
    assert len(list(draft_data.generate(make, chunks, whole, seed=4))) == 3
    broken = tmp_path / "broken"
    run = draft_data.generate(make, chunks, broken, seed=4)
    next(run)
    run.close()
    (broken / "chunk-00001.77.part").write_bytes(b"half")
    assert len(list(draft_data.generate(make, chunks, broken, seed=4))) == 2
    for mine, theirs in zip(draft_data.read_chunks(whole), draft_data.read_chunks(broken), strict=True):
        assert mine["kinds"] == theirs["kinds"] == ["chat"] * 6
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if isinstance(mine[key], torch.Tensor))


def test_two_workers_share_the_chunks(toy, tmp_path):
    """Two processes did the same chunk, or neither did."""
    chunks = [jobs(4, seed) for seed in range(3)]
    for worker in range(2):
        mine = [i for i in range(3) if i % 2 == worker]
        made = list(
            draft_data.generate(
                lambda: draft_data.BatchGenerator(toy, 4, end=2), chunks, tmp_path, 4, lambda i, w=worker: i % 2 == w
            )
        )
        assert len(made) == len(mine)
    assert len(draft_data.read_chunks(tmp_path)) == 3


# -- training and counting ----------------------------------------------------------------------------------------


def test_all_steps_of_all_drafts_at_once_equal_one_draft_after_another(toy):
    """The masks of the parallel roll-out let a draft see a feature it could not have: training and test both lie."""
    torch.manual_seed(0)
    student = draft_train.ConditionedStudent(toy, torch.arange(0, 60, 2), [answer(toy)]).eval()
    tokens = torch.randint(3, 60, (1, 14))
    with torch.no_grad():
        features = toy.model(tokens).last_hidden_state
        every = student.predict(tokens, features, 3)
        embeddings = student.embedding[0][tokens]
        for start in (4, 9):  # the last committed token; features are known up to start - 1
            cache = student.layer.new_cache(14)
            out = student.layer(embeddings[:, 1 : start + 1], features[:, :start], torch.arange(start), cache)[:, -1:]
            for step in range(3):
                torch.testing.assert_close(every[step][:, start + step], out[:, 0], rtol=1e-4, atol=1e-4)
                at = start + step
                out = student.layer(embeddings[:, at + 1 : at + 2], out, torch.tensor([at]), cache)


def test_counting_walks_in_cycles():
    """Proposals counted behind the end of a text, or a refused token's successors counted as tried."""
    hits = torch.tensor([[True] * 2, [True] * 2, [False] * 2, [True] * 2, [True] * 2])
    result = draft_eval._summary([(hits, "chat")], (1, 2))
    # gamma 2: accepts 2 of 2 (and takes the third token from the target), then 2 of 2 at the end
    assert result["acceptance"]["2"] == 1.0 and result["tokens_per_cycle"]["2"] == 2.5
    # gamma 1: token 1 accepted and 2 is the bonus; 3 refused; 4 accepted and 5 the bonus
    assert result["acceptance"]["1"] == pytest.approx(2 / 3)
    assert result["by_position"] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["plain", "conditioned"])
def test_a_toy_run_learns(toy, tmp_path, kind):
    """End to end: answers, restricted head, training, counting. A draft that does not learn shows a broken loss."""
    torch.manual_seed(1)
    data = answer(toy, count=32, new=16)
    data["kinds"] = ["chat"] * 32
    head_ids, coverage = draft_train.frequent_ids([data], 40, end=2)
    assert 2 in head_ids and 0 < coverage <= 1
    rows = toy.lm_head.weight.detach()[head_ids]
    if kind == "plain":
        student = draft_train.PlainStudent(toy, layers=1)
    else:
        student = draft_train.ConditionedStudent(toy, head_ids, [data])
    chances = draft_eval.target_chances([data], toy.lm_head.weight.detach())
    before = draft_eval.evaluate(student, [data], head_ids, rows, chances=chances)
    reports = []
    options = draft_train.TrainOptions(epochs=40, batch=8, steps=2 if kind == "conditioned" else 1)
    draft_train.train(student, [data], rows, options, lambda *facts: reports.append(facts))
    after = draft_eval.evaluate(student, [data], head_ids, rows, chances=chances)
    assert len(reports) == 5 and reports[-1][2] < 0.5 * reports[0][2]
    for text in ("greedy", "sampled"):
        assert after[text]["acceptance"]["1"] > before[text]["acceptance"]["1"]


def test_sampled_acceptance_is_that_of_the_rule():
    """The chance of acceptance given the text's token must add up to sum(min(p, q)) over what the target may say."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    given = torch.minimum(torch.ones(3), q / p)
    assert float((p * given).sum()) == pytest.approx(0.7)


def record(name: str, kind: str, greedy: float) -> dict:
    def figures(value: float) -> dict:
        acceptance = {g: value - 0.01 * i for i, g in enumerate("1234")}
        per_cycle = {g: 1.5 + 0.1 * int(g) for g in "1234"}
        positions = [value, value / 2, None, 0.0]
        return {
            "acceptance": acceptance,
            "tokens_per_cycle": per_cycle,
            "by_position": positions,
            "by_kind": {g: {"code": 0.5, "exercise": value} for g in "14"},
        }

    point = {"tokens": 12_000, "seconds": 3.0, "loss": 1.0, "acceptance": 0.123}
    return {
        "name": name, "kind": kind, "layers": 1, "head": 40, "coverage": 0.9876, "parameters": 1_234_000, "answers": 3,
        "seen_tokens": 77_000, "seconds": 600.0,
        "options": {"batch": 8, "epochs": 2.5, "seed": 3, "steps": 1, "minutes": None},
        "curve": [point] * 5, "final": {"greedy": figures(greedy), "sampled": figures(greedy / 2)},
        "full_head": {"greedy": figures(0.444)}, "same_texts_restricted_head": {"greedy": figures(0.333)},
    }  # fmt: skip


def test_the_card_says_what_the_records_say():
    """A figure typed by hand stays when the next run changes; a missed goal must not read as reached."""
    data = dict(
        train_answers=10, train_tokens=999, held_out_answers=4, held_out_tokens=88, seed=20, new_tokens=16, minutes=7.0,
        longest=33, timed=2, chunks=3,
    )  # fmt: skip
    runs = [record("plain-1", "plain", 0.312), record("conditioned", "conditioned", 0.671)]
    shipped = {"plain": "plain-1", "conditioned": "conditioned"}
    text = draft_card.card(data, runs, shipped, {"plain": 7_000_000, "conditioned": 8_400_000})
    assert "plain 31.2% against a goal of 55.0%, **missed**" in text
    assert "conditioned 67.1% against a goal of 65.0%, reached" in text
    for words in ("999 tokens", "98.8%", "33.3% / 44.4%", "12.3% (12k)", "7.0 MB", "Apache-2.0", "conditioned 77.1"):
        assert words in text, words
    assert "{" not in text and "nan" not in text


def test_what_ships_is_bf16_and_names_its_licence(tmp_path):
    """FP32 weights would break the size limit, and a file without its licence must not travel."""
    source = tmp_path / "run.safetensors"
    save_file({"model.norm.weight": torch.tensor([0.1, 0.2]), "head_ids": torch.tensor([2, 5])}, source)
    into = tmp_path / "drafts" / "plain.safetensors"
    assert draft_card.ship(source, into, {"layers": 1, "kind": "plain"}) == into.stat().st_size
    with safe_open(into, "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16
        assert file.get_tensor("head_ids").tolist() == [2, 5]
        assert file.metadata()["licence"] == "Apache-2.0" and file.metadata()["layers"] == "1"
