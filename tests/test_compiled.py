"""Static cache, compiled decode step, 16-bit choice, and the ladder's rungs made of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from every_millisecond import doctor, openmp
from every_millisecond.ladder import rungs
from llm_latency import hardware, models
from llm_latency.arguments import dtype_name
from llm_latency.generation import CompiledStepper, StaticStepper, TransformersStepper, generate


@pytest.fixture
def quick_compile(monkeypatch):
    """torch.compile with Dynamo's part alone: the graph is captured and guarded, no kernels are built."""
    real = torch.compile
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", lambda fn, mode=None, **options: real(fn, backend="eager", **options))
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return request.getfixturevalue(request.param)


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 37, 150])
def test_static_cache_scores_as_a_growing_one(model, length):
    """Slots that are not filled yet must be masked, at the first chunk and at later ones."""
    expected = TransformersStepper(model).score(ids_of(length))
    torch.testing.assert_close(StaticStepper(model, 151).score(ids_of(length)), expected, rtol=1e-4, atol=1e-4)


def test_static_cache_forgets_the_last_request(model):
    """The same tensors serve every request: a longer one before must leave nothing behind."""
    fresh, used = StaticStepper(model, 96), StaticStepper(model, 96)
    generate(used, ids_of(60, seed=1), 30)
    assert torch.equal(used.prefill(ids_of(9)), fresh.prefill(ids_of(9)))
    steps = [stepper.step(torch.tensor([[5, 6]])) for stepper in (used, fresh)]
    assert torch.equal(*steps) and steps[0].shape == (1, 2, 97)


@pytest.mark.parametrize("kind", [StaticStepper, CompiledStepper])
def test_a_full_static_cache_says_so(model, kind, quick_compile):
    """Writing past the end loses a CUDA context, or a prompt's end: refuse before."""
    stepper = kind(model, 10)
    with pytest.raises(RuntimeError, match="before prefill"):
        stepper.step(torch.tensor([[5]]))
    with pytest.raises(ValueError, match="11 tokens do not fit the static cache of max_tokens=10"):
        stepper.prefill(ids_of(11))
    with pytest.raises(ValueError, match="need 11 positions"):
        generate(stepper, ids_of(6), 5)
    stepper.prefill(ids_of(10))
    with pytest.raises(ValueError, match="11 tokens do not fit"):
        stepper.step(torch.tensor([[5]]))
    for wrong in (0, 513, 8.0, True):
        with pytest.raises((ValueError, TypeError), match="max_tokens="):
            kind(model, wrong)


def test_one_graph_serves_every_position_and_request(model, quick_compile):
    """A cache length, a Python counter or a stride that enters the graph would compile again at every token."""
    stepper = CompiledStepper(model, 64)
    reference = TransformersStepper(model)
    for length, new in ((7, 20), (23, 30), (1, 5)):
        assert torch.equal(
            generate(stepper, ids_of(length), new).sequences, generate(reference, ids_of(length), new).sequences
        )
    torch.testing.assert_close(stepper.score(ids_of(40)), reference.score(ids_of(40)), rtol=1e-4, atol=1e-4)
    assert stepper.step(torch.tensor([[5, 6, 7]])).shape == (1, 3, 97)  # several tokens: the uncompiled model
    assert quick_compile["stats"]["unique_graphs"] == 1
    assert not quick_compile["graph_break"]


def test_mode_follows_the_device(tiny_llama, quick_compile):
    """CUDA graphs exist on CUDA only; asking a CPU for them gives a warning and nothing else."""
    stepper = CompiledStepper(tiny_llama, 16)
    assert not stepper.uses_graphs


COMPILE_FOR_REAL = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from every_millisecond import openmp
from llm_latency.generation import CompiledStepper, TransformersStepper
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=48, intermediate_size=112, num_hidden_layers=1,
                                     num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)).eval()
ids = torch.randint(0, 97, (1, 9))
difference = (CompiledStepper(model, 32).score(ids) - TransformersStepper(model).score(ids)).abs().max()
print(json.dumps([float(difference), len(openmp.loaded_runtimes())]))
"""


@pytest.mark.long
@pytest.mark.skipif(doctor.compile_unavailable() is not None, reason=f"compile: {doctor.compile_unavailable()}")
def test_the_compiled_kernels_are_right():
    """The tests above stop before code is generated; this one builds it, in a process with one OpenMP runtime."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_REAL], env=openmp.process_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    difference, runtimes = json.loads(done.stdout.splitlines()[-1])
    assert difference < 1e-4
    assert runtimes <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graph_hands_out_logits_that_stay(tiny_llama):
    """A graph writes to the same place at each replay: logits kept from one step must survive the next."""
    torch._dynamo.reset()
    model = tiny_llama.cuda()
    stepper, reference = CompiledStepper(model, 64), TransformersStepper(model)
    ids = ids_of(9).cuda()
    torch.testing.assert_close(stepper.score(ids), reference.score(ids), rtol=1e-3, atol=1e-3)
    stepper.prefill(ids)
    first = stepper.step(torch.tensor([[5]]).cuda())
    kept = first.clone()
    stepper.step(torch.tensor([[6]]).cuda())
    assert stepper.uses_graphs and torch.equal(first, kept)


def test_sixteen_bits_are_asked_of_the_device(monkeypatch):
    """A T4 runs BF16 by emulation, slower than FP32: the question must be about units, not about acceptance."""
    assert hardware.half_dtype("cpu") == torch.bfloat16
    assert isinstance(hardware.bf16_is_native("cpu"), bool)
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(hardware, "check_device", lambda device: torch.device("cuda"))
        monkeypatch.setattr(hardware, "bf16_is_native", lambda device, native=native: native)
        assert hardware.half_dtype() == expected
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(ValueError, match=r"dtype=torch.int8"):
        dtype_name(torch.int8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model as a directory, as a learner would hand in."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=112, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=600,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["static-cache", "sdpa", "half-alone", "half", "compiled-alone", "compiled"])
def test_rungs_of_precision_and_compilation(name, directory, quick_compile):
    """Each builder makes a stepper of the weights it is entered with, and an exact one keeps the baseline's tokens."""
    entry = rungs.rung(name)
    stepper = entry.build(directory)
    assert dtype_name(stepper.model.dtype) == entry.weights
    baseline = rungs.rung(rungs.BASELINE).build(directory)
    ids = ids_of(21).to(stepper.device)
    if entry.exact:
        assert torch.equal(generate(stepper, ids, 12).sequences, generate(baseline, ids, 12).sequences)
    else:
        tolerance = 0.1 * baseline.score(ids).abs().max()
        assert (stepper.score(ids).float() - baseline.score(ids)).abs().max() < tolerance


def test_without_a_compiler_the_rung_says_so(monkeypatch):
    """The ladder goes on; the reason is what the issue promised."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    monkeypatch.setattr(doctor.torch, "__file__", "/opt/torch/__init__.py")  # a path without a blank
    assert rungs.rung("compiled").unavailable() == "no C++ compiler"
    assert rungs.rung("sdpa").unavailable() is None


@pytest.mark.long
@pytest.mark.model
def test_the_real_model_keeps_its_tokens(target, tokenizer):
    """SDPA and a static cache change the order of additions only: 50 greedy tokens of the standard request stay."""
    from every_millisecond.request import NEW_TOKENS, standard_prompt
    from llm_latency.text.prompt import encode_prompt

    ids = torch.tensor([encode_prompt(tokenizer, standard_prompt(tokenizer))])
    eager = models.load_target("smollm2-135m", dtype=torch.float32, attn_implementation="eager", device="cpu")
    expected = generate(TransformersStepper(eager), ids, NEW_TOKENS).sequences
    assert torch.equal(generate(StaticStepper(target), ids, NEW_TOKENS).sequences, expected)
