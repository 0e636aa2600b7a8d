"""The pretend GPU: each fault that it is there to find is found, and code that is right runs on it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is here")]
HOST = torch.ones(2, 3)


def on_gpu(*shape) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cuda()


def captured(run):
    """`run` as a graph, with what it returned; one call before, as every capture needs."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


# -- what a tensor is -------------------------------------------------------------------------------------------------


def test_a_tensor_says_where_it_is():
    """Guards against a pretend tensor that code takes for a host tensor."""
    x = on_gpu(2, 3)
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda:0") and x.get_device() == 0
    assert x.device.type == "cuda" and (x + 1).device == x.device and "cuda:0" in repr(x)
    assert torch.zeros_like(x).is_cuda and x.new_zeros(2).is_cuda and torch.empty(3, device=x.device).is_cuda
    assert not x.cpu().is_cuda and not torch.zeros(2).is_cuda and not x.new_zeros(2, device="cpu").is_cuda
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda and nn.Linear(2, 2).weight.is_cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_every_name_of_the_device(device):
    """Guards against a spelling that slips through to torch, which would ask for CUDA."""
    for x in (torch.ones(2, device=device), torch.tensor([1.0, 1.0], device=device), torch.ones(2).to(device)):
        assert x.is_cuda and x.tolist() == [1.0, 1.0]


def test_a_second_gpu_is_not_there():
    """Guards against an index taken for granted."""
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:1")


def test_values_views_and_writes_are_real():
    """Guards against a wrapper that loses what is written through a view."""
    x = on_gpu(4, 5)
    before = x.cpu()
    x[1:3].mul_(2)
    x[0] = 7.0
    x[:, x[0] > 100] = 1.0
    before[1:3].mul_(2)
    before[0] = 7.0
    assert torch.equal(x.cpu(), before)
    assert torch.equal(x.t().contiguous().softmax(-1).cpu(), before.t().contiguous().softmax(-1))


def test_modules_move_and_stay_tied():
    """Guards against tied weights that are two tensors after a move, and a copy that shares them."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second).cuda()
    assert model[0].weight is model[1].weight and isinstance(model[0].weight, nn.Parameter)
    assert len(list(model.parameters())) == 3 and all(p.is_cuda for p in model.parameters())
    there = copy.deepcopy(model)
    assert there[0].weight is there[1].weight is not model[0].weight
    x = torch.ones(1, 4)
    expected = model(x.cuda()).detach().cpu()
    assert torch.allclose(there.cpu()(x), expected)
    model(x.cuda()).sum().backward()
    assert model[0].weight.grad.is_cuda


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) * x,
        lambda x: torch.cat([x, torch.ones(1, 3)]),
        lambda x: F.linear(x, torch.ones(4, 3)),
        lambda x: F.embedding(torch.tensor([0]), x),
        lambda x: x.masked_fill(torch.tensor([True, False, True]), 0.0),
        lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
        lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
        lambda x: x.index_copy_(0, torch.tensor([0]), x[:1]),
        lambda x: torch.ones(3)[(x[0] > 0)],
        lambda x: x.sum() + torch.ones(3),
    ],
)
def test_two_devices_do_not_meet(mix):
    """Guards against a tensor left on the host."""
    with pytest.raises(RuntimeError, match="same device"):
        mix(on_gpu(2, 3))


def test_a_number_on_the_host_may_meet_a_tensor():
    """Guards against refusing what CUDA allows: numbers, tensors without dimensions, indices on the host."""
    x = on_gpu(2, 3)
    assert (x * 2 + torch.tensor(1.0)).is_cuda and x[torch.tensor([0])].shape == (1, 3)
    x[0, 0] = torch.tensor(4.0)
    assert x[0, 0].item() == 4.0


def test_a_mask_on_the_host_is_refused_by_attention():
    """Guards against the mask that was made without a device."""
    q = on_gpu(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    with pytest.raises(RuntimeError, match="same device"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    expected = F.scaled_dot_product_attention(*3 * [q.cpu()], attn_mask=mask)
    assert torch.allclose(F.scaled_dot_product_attention(q, q, q, attn_mask=mask.cuda()).cpu(), expected)


def test_flash_takes_no_fp32():
    """Guards against a kernel chosen by name for a dtype that it lacks on CUDA, though the CPU's has it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = on_gpu(1, 2, 4, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(q, q, q)
        assert F.scaled_dot_product_attention(*3 * [q.half()]).dtype == torch.float16


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_numpy_reads_host_memory_only():
    """Guards against a plot or a report fed with device tensors."""
    x = on_gpu(3)
    for read in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array(x)):
        with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
            read()
    assert x.cpu().numpy().shape == (3,)


def test_a_generator_belongs_to_its_device():
    """Guards against seeds that work on the CPU only."""
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(3, device="cuda", generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type"):
        torch.multinomial(on_gpu(4).abs(), 1, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type"):
        torch.rand(3, generator=torch.Generator("cuda"))
    draws = [torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).tolist() for _ in "ab"]
    assert draws[0] == draws[1] and isinstance(torch.default_generator, torch.Generator)


def test_memory_is_counted_and_the_card_has_an_end():
    """Guards against views counted twice, released memory still counted, and a card without a limit."""
    assert torch.cuda.memory_allocated() == 0
    x = torch.zeros(1000, device="cuda")
    y = x.view(10, 100)[2:]
    assert torch.cuda.memory_allocated() == 4096  # in blocks of 512 bytes
    del x
    assert torch.cuda.memory_allocated() == 4096
    del y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0


def test_a_full_card(gpu):
    """Guards against models that fit the host and not the card."""
    gpu.allocated += gpu.card.total_memory
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.zeros(1, device="cuda")
    gpu.allocated -= gpu.card.total_memory


# -- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x.argmax().__index__(),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: torch.cuda.synchronize(),
        lambda x: print(x),
        lambda x: f"{x.sum():.2f}",
        lambda x: torch.multinomial(x.abs(), 1),
    ],
)
def test_a_wait_is_counted(wait, gpu):
    """Guards against a host sync in a loop that nobody sees."""
    x = on_gpu(2, 3)
    before = len(gpu.syncs)
    wait(x)
    assert len(gpu.syncs) == before + 1


def test_launches_wait_for_nothing(gpu):
    """Guards against counting a wait where CUDA has none."""
    x = on_gpu(2, 3)
    syncs, launches = len(gpu.syncs), gpu.launches
    y = (x @ x.t()).softmax(-1) * 2
    y[0] = 1.0
    y.masked_fill_(y > 1, 0.0)
    y[y > 0.5] = 0.0
    torch.arange(5, device="cuda")
    torch.full((1, 1), 3, device="cuda")
    torch.ones(3).to("cuda", non_blocking=True)
    torch.zeros(2, 3, pin_memory=True).copy_(x, non_blocking=True)
    torch.zeros(2, 3, pin_memory=True).copy_(x, non_blocking=True)
    y.view(4).float().max(dim=-1)
    assert len(gpu.syncs) == syncs and gpu.launches > launches + 8


def test_events_are_not_ready_until_something_waits():
    """Guards against a time read before the work is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    on_gpu(3).mul_(2)
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert end.query() and start.elapsed_time(end) > 0
    end.record()
    assert not end.query()
    torch.cuda.synchronize()
    assert end.query()
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_a_stream_is_waited_for_alone():
    """Guards against an event of one stream read after a wait for another, and a wait_stream that does nothing."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there = side.record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.current_stream().synchronize()
    assert not there.query()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert there.query()


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_a_graph_replays_with_new_inputs(gpu):
    """Guards against a replay that gives the captured values, loses a write in place, or is not one launch."""
    x, total = on_gpu(2, 3), torch.zeros(2, 3, device="cuda")

    def run():
        y = (x * 2).relu()
        total.add_(y)
        return y.sum(dim=0)

    graph, out = captured(run)
    assert out.isnan().all(), "a capture computes nothing"
    for _ in range(2):
        x.copy_(on_gpu(2, 3) + 1)
        before, launches = total.clone(), gpu.launches
        graph.replay()
        assert gpu.launches == launches + 1
        assert torch.allclose(total, before + (x * 2).relu()) and torch.allclose(out, (x * 2).relu().sum(dim=0))


@pytest.mark.parametrize(
    "fault, reason",
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x * torch.tensor(2.0, device="cuda"), "copy from the host"),
        (lambda x: x.copy_(HOST), "copy_"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: torch.zeros(3), "zeros"),
        (lambda x: torch.tensor(1.0), "tensor on the host"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
    ],
)
def test_a_capture_refuses(fault, reason):
    """Guards against steps that a graph cannot hold: waits, copies from or to the host, work on host tensors."""
    x = on_gpu(2, 3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=f"not permitted when stream is capturing.*{reason}"):
        with torch.cuda.graph(graph):
            fault(x)
    assert x.sum().item() < 100, "the device works on after a failed capture"


def test_a_graph_is_only_replayed_after_its_capture_and_while_its_memory_is_there():
    """Guards against a cache or a weight that is made anew while a graph still points at the old one."""
    with pytest.raises(RuntimeError, match="without a finished capture"):
        torch.cuda.CUDAGraph().replay()
    held = {"x": on_gpu(3)}
    graph, _ = captured(lambda: held["x"] * 2)
    graph.replay()
    held["x"] = on_gpu(3)
    with pytest.raises(RuntimeError, match="freed since its capture"):
        graph.replay()


# -- cards ------------------------------------------------------------------------------------------------------------


@pytest.mark.pretend_card("T4")
def test_a_t4_has_no_bf16_and_no_packed_int4():
    """Guards against a card that can do what it cannot."""
    assert torch.cuda.get_device_capability() == (7, 5) and not torch.cuda.is_bf16_supported(including_emulation=False)
    assert torch.cuda.get_device_properties(0).total_memory < 16e9 and "T4" in torch.cuda.get_device_name()
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0"):
        torch.ops.aten._convert_weight_to_int4pack(torch.zeros(8, 64, dtype=torch.uint8, device="cuda"), 8)


def test_packed_int4_is_the_product_that_it_says():
    """Guards against a packing whose codes come back in another order, and widths that CUDA's layout lacks."""
    q = torch.randint(0, 16, (16, 256), generator=torch.Generator().manual_seed(1))
    bytes_ = ((q[:, ::2] << 4) | q[:, 1::2]).to(torch.uint8).cuda()
    table = torch.randn(2, 16, 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    scales, zeros = table.float().permute(2, 1, 0)[..., None]
    expected = x.float() @ ((q.view(16, 2, 128).float() - 8) * scales + zeros).view(16, 256).t()
    packed = torch.ops.aten._convert_weight_to_int4pack(bytes_, 8)
    got = torch.ops.aten._weight_int4pack_mm(x.cuda(), packed, 128, table.cuda()).float().cpu()
    assert (got - expected).norm() / expected.norm() < 0.01
    with pytest.raises(RuntimeError, match="multiple of 128"):
        torch.ops.aten._convert_weight_to_int4pack(bytes_[:, :96].contiguous(), 8)


# -- real use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_transformers_generates_on_it(tiny_llama, options):
    """Guards against rules so strict that right code fails: the ids are the CPU's."""
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    options = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, **options)
    expected = tiny_llama.generate(ids, attention_mask=mask, **options)
    model = tiny_llama.cuda()
    assert torch.equal(model.generate(ids.cuda(), attention_mask=mask.cuda(), **options).cpu(), expected)
    with pytest.raises(RuntimeError, match="same device"):
        model(ids)


def test_the_machine_is_itself_again_afterwards():
    """Guards against a pretend device that outlives its context."""
    from pretend_gpu import pretend

    torch.cuda.is_available = lambda: False  # within the test's own device, which puts it back
    before = torch.cuda.is_available, torch.Generator, nn.Module._apply
    with pretend("L4") as inner:
        assert torch.cuda.is_available() and "L4" in inner.card.name
    assert (torch.cuda.is_available, torch.Generator, nn.Module._apply) == before
    with pytest.raises(KeyError, match="no pretend card 'B200'"), pretend("B200"):
        pass
