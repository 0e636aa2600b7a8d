"""The same row gives the same bits: alone, in company, in chunks, on any number of threads, on 4, 8 and 16 lanes."""

from __future__ import annotations

import kernel_toys
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings

from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.engine.kernel_rows import BLOCK
from llm_latency.generation import generate
from llm_latency.kv_cache import BlockManager

pytestmark = kernel_toys.needs_kernel()
BLOCKS = 40
PROPERTY = property_settings(25)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def toy(request):
    return kernel_toys.make_toy(request.param)


@pytest.fixture(scope="module")
def llama():
    return kernel_toys.make_toy("llama")


def alone(model, texts: list[list[int]], **options) -> list[torch.Tensor]:
    """Logits [n, vocab] of each text, token by token, one thread."""
    decoder = KernelDecoder.from_model(model, threads=1, **options)
    found = []
    for text in texts:
        table = torch.arange(-(-len(text) // BLOCK))[None]
        found.append(torch.cat([decoder.rows([token], [at], table) for at, token in enumerate(text)]))
    return found


@st.composite
def schedules(draw):
    """Texts of several requests, the blocks they get, and the passes in which their rows are computed."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    blocks = torch.randperm(BLOCKS, generator=generator).tolist()
    tables = [[blocks.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    left = [list(range(n)) for n in lengths]
    passes = []
    while any(left):
        rows = []
        for request, todo in enumerate(left):
            take = draw(st.integers(0, min(len(todo), 70)))
            rows += [(request, position) for position in todo[:take]]
            del todo[:take]
        if rows:
            passes.append(rows)
    return texts, tables, passes


@PROPERTY
@given(
    schedule=schedules(),
    threads=st.integers(1, 5),
    options=st.sampled_from([{}, {"activations": "int8"}, {"cache": "int8"}]),
)
def test_company_chunks_blocks_and_threads_change_no_bit(toy, schedule, threads, options):
    """Guards against batch variance: a sum split by threads, a kernel chosen by the rows, a block read twice."""
    texts, tables, passes = schedule
    expected = alone(toy, texts, max_length=96, **options)
    decoder = KernelDecoder.from_model(toy, threads=threads, blocks=BLOCKS, max_length=96, **options)
    width = max(map(len, tables))
    for rows in passes:
        logits = decoder.rows(
            [texts[request][at] for request, at in rows],
            [at for _, at in rows],
            [tables[request] + [0] * (width - len(tables[request])) for request, _ in rows],
        )
        for row, (request, at) in zip(logits, rows, strict=True):
            assert torch.equal(row, expected[request][at]), (request, at)


@PROPERTY
@given(cuts=st.lists(st.integers(1, 80), max_size=4), threads=st.integers(1, 4))
def test_a_prompt_in_any_chunks_gives_the_same_continuation(llama, cuts, threads):
    """Guards against chunked prefill that differs from whole prefill, across a pass, a block, a chunk of text."""
    ids = torch.randint(0, 97, (1, 130), generator=torch.Generator().manual_seed(8))
    decoder = KernelDecoder.from_model(llama, threads=threads)
    expected = decoder.prefill(ids)
    features = decoder.features
    pieces = ids.split([*cuts, 130 - sum(cuts)], dim=1) if sum(cuts) < 130 else ids.split(13, dim=1)
    decoder.prefill(pieces[0])
    found = [decoder.features]
    for piece in pieces[1:]:
        last = decoder.step(piece)[:, -1]
        found.append(decoder.features)
    if len(pieces) > 1:
        assert torch.equal(last, expected)
    assert torch.equal(torch.cat(found), features)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("options", [{}, {"activations": "int8", "cache": "int8"}])
def test_every_number_of_lanes_gives_the_same_bits(toy, lanes, options, monkeypatch):
    """Guards against a layout that only works on the machine at hand: that of AVX-512 and that of Arm run here, with
    the plain product, and give the bits that this processor's own instructions give."""
    ids = torch.randint(0, 97, (1, 90), generator=torch.Generator().manual_seed(9))
    expected = KernelDecoder.from_model(toy, threads=2, **options).score(ids)
    other = kernel_library.load(f"-DLANES={lanes}", "-DPLAIN")
    assert other.kernel_lanes() == lanes
    monkeypatch.setattr(kernel_library, "load", lambda: other)
    assert torch.equal(KernelDecoder.from_model(toy, threads=2, **options).score(ids), expected)


@pytest.mark.long
@pytest.mark.model
def test_the_real_model_gives_the_same_bits_in_a_batch(target):
    """Guards against a difference that needs real sizes: 576 and 1,536 columns, nine heads on three."""
    generator = torch.Generator().manual_seed(4)
    texts = torch.randint(3, 49000, (3, 70), generator=generator).tolist()
    one = KernelDecoder.from_model(target, threads=1, max_length=80)
    expected = torch.stack([one.score(torch.tensor([text]))[0, -3:] for text in texts])  # [3, 3, vocab]
    many = KernelDecoder.from_model(target, threads=3, max_length=80, blocks=20)
    tables = torch.randperm(20, generator=generator)[:15].view(3, 5)
    for request, text in enumerate(texts):
        many.rows(text[:67], range(67), tables[request].expand(67, -1), wanted=[])
    logits = many.rows(
        [text[at] for at in (67, 68, 69) for text in texts],
        [at for at in (67, 68, 69) for _ in texts],
        tables.repeat(3, 1),
    )
    assert torch.equal(logits.view(3, 3, -1).transpose(0, 1), expected)


def test_a_block_managers_tables_serve_two_requests_with_one_beginning(llama):
    """Guards against a batching engine and a pool that count blocks differently: shared blocks are read by both."""
    decoder = KernelDecoder.from_model(llama, max_length=64, blocks=8)
    manager = BlockManager(8, BLOCK)
    common = torch.randint(3, 97, (32,), generator=torch.Generator().manual_seed(6)).tolist()
    texts = [[*common, 11, 12, 13], [*common, 21, 22]]
    expected = [alone(llama, [text], max_length=64)[0][-1] for text in texts]
    for request, text in enumerate(texts):
        found = manager.open(request, text)
        assert found == (32 if request else 0)
        manager.append(request, text[found:])
        new = list(range(found, len(text)))
        table = [manager.table(request)] * len(new)
        logits = decoder.rows([text[at] for at in new], new, table, wanted=[len(new) - 1])
        manager.commit(request)
        assert torch.equal(logits[0], expected[request])
    assert manager.table(0)[:2] == manager.table(1)[:2]


def test_wanted_rows_are_those_asked_for(llama):
    """Guards against logits in the wrong order, across passes and within one."""
    ids = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(7))
    decoder = KernelDecoder.from_model(llama, max_length=160)
    table = torch.arange(10).expand(150, -1)
    every = decoder.rows(ids, range(150), table)
    wanted = [149, 3, 64, 63, 3]
    assert torch.equal(decoder.rows(ids, range(150), table, wanted=wanted), every[wanted])
    assert decoder.rows(ids, range(150), table, wanted=[]).shape == (0, 97)
    assert decoder.features.shape == (150, 96)


def test_more_threads_than_cores_and_fewer_than_asked_for(llama, monkeypatch):
    """Guards against a barrier that waits for a thread which OpenMP did not give, or starves one without a core."""
    ids = torch.tensor([[5, 6, 7]])
    expected = generate(KernelDecoder.from_model(llama, threads=1), ids, 10).sequences
    assert torch.equal(generate(KernelDecoder.from_model(llama, threads=24), ids, 10).sequences, expected)
