"""What a GPU may have against the course: each fault on a pretended card or a faked answer, each with its remedy."""

from __future__ import annotations

import functools

import pytest
import torch

from every_millisecond import gpu_card, gpu_check


def on_card(test, name: str = "A100-40GB"):
    """Marks a test to run on a pretended card alone."""
    here = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU answers for itself")
    return pytest.mark.cuda(pytest.mark.pretend_card(name)(here(test)))


def row(name: str) -> gpu_card.Check:
    return {check.name: check for check in gpu_card.checks()}[name]


def smi(monkeypatch, **answers: str) -> None:
    """Let nvidia-smi and nvcc answer; the key is a word of the call. What is not given is not there."""

    def run(command, **_):
        for word, said in answers.items():
            if any(word in part for part in command):
                return type("Done", (), {"stdout": said})
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(gpu_card.subprocess, "run", run)


@on_card
def test_a_good_card_has_no_complaint(monkeypatch):
    """Guards against a doctor that warns of what is right."""
    smi(monkeypatch)
    found = {check.name: check for check in gpu_card.checks() if not check.works}
    assert set(found) <= {"nvcc"} and gpu_check.refusal() is None
    assert row("GPU memory").found == "42.3 GB; every notebook fits on smollm2-135m"
    assert row("CUDA").found == "NVIDIA A100-SXM4-40GB, torch built for CUDA 12.8"


@on_card
def test_a_card_too_small_names_the_notebooks(monkeypatch):
    """Guards against a 7B profile on a 40 GB card that dies in the middle of notebook 05."""
    monkeypatch.setenv("LLM_LATENCY_PROFILE", "qwen2.5-7b")
    check = row("GPU memory")
    assert not check.works and "on qwen2.5-7b too little for notebooks 05 (" in check.found
    assert "LLM_LATENCY_PROFILE=smollm2-135m" in check.remedy and not check.needed


@on_card
def test_a_card_too_old_is_refused(monkeypatch):
    """Guards against "no kernel image is available" from the first product on a V100 or P100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    check = row("GPU age")
    assert not check.works and check.needed and "sm_70; the course needs sm_75" in check.found
    assert 'CUDA_VISIBLE_DEVICES=""' in check.remedy and "sm_70" in gpu_check.refusal()
    assert gpu_check.main("/nowhere") == gpu_check.NO_CUDA


@functools.partial(on_card, name="T4")
def test_a_t4_is_told_of_its_format():
    """Guards against BF16 on a card that emulates it, unsaid."""
    check = row("GPU age")
    assert check.works and "FP16 and no BF16" in check.found


@on_card
@pytest.mark.parametrize("used_gb, works", [(0.5, True), (20, False)])
def test_another_process_is_seen(used_gb, works, monkeypatch):
    """Guards against a busy GPU, on which every figure of the class is wrong and nobody notices."""
    smi(monkeypatch, **{"compute-apps": "4711, 20123 MiB\n"})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int((80 - used_gb) * 1e9), int(80e9)))
    check = row("GPU sharing")
    assert (
        check.works == works and f"{used_gb:.1f} of 80 GB" in check.found and "process 4711, 20123 MiB" in check.found
    )
    assert "end them or wait" in check.remedy


@on_card
@pytest.mark.parametrize(
    "which, said, works, found",
    [
        (None, "", False, "none: flash-attn cannot be built"),
        ("/usr/bin/nvcc", "Cuda compilation tools, release 11.8, V11.8.89", False, "CUDA 11.8, but torch is built for"),
        ("/usr/bin/nvcc", "Cuda compilation tools, release 12.4, V12.4.1", True, "CUDA 12.4"),
    ],
)
def test_nvcc(which, said, works, found, monkeypatch):
    """Guards against half an hour of building flash-attn that cannot succeed."""
    monkeypatch.setattr(gpu_card.shutil, "which", lambda name: which)
    smi(monkeypatch, nvcc=said)
    check = row("nvcc")
    assert check.works == works and found in check.found and (works or "CUDA 12.8 toolkit" in check.remedy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
@pytest.mark.parametrize(
    "built, answers, found, remedy",
    [
        (None, {}, "none; the notebooks teach the same on the CPU", "nothing to do"),
        (None, {"query-gpu": "NVIDIA A10\n"}, "NVIDIA A10 is here, but torch", "from the CUDA index"),
        (
            "13.0",
            {"query-gpu": "NVIDIA A10\n", "nvidia-smi": "| Driver Version: 535.1  CUDA Version: 12.2 |"},
            "knows CUDA up to 12.2, torch is built for 13.0",
            "built for CUDA 12.2",
        ),
        ("12.1", {"query-gpu": "NVIDIA A10\n", "nvidia-smi": "CUDA Version: 12.2"}, "cannot use it", "VISIBLE_DEVICES"),
    ],
)
def test_a_torch_for_another_cuda(built, answers, found, remedy, monkeypatch):
    """Guards against "no GPU" on a machine that has one, which torch was not built for."""
    monkeypatch.setattr(torch.version, "cuda", built)
    smi(monkeypatch, **answers)
    (check,) = gpu_card.checks()
    assert not check.works and found in check.found and remedy in check.remedy
    assert found in gpu_check.refusal() and remedy in gpu_check.refusal()


@on_card
def test_a_mig_slice_is_named(monkeypatch):
    """Guards against a slice's bandwidth held against the whole GPU's datasheet."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    check = row("whole GPU")
    assert not check.works and "MIG 3g.20gb is a MIG slice" in check.found and "--refresh" in check.remedy
    assert not check.needed


@on_card
def test_of_two_gpus_the_first_is_used_and_said(monkeypatch):
    """Guards against figures whose GPU nobody knows."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check = row("GPU choice")
    assert check.works and "2 GPUs are visible; the first, NVIDIA A100-SXM4-40GB, is used" in check.found
    assert "CUDA_VISIBLE_DEVICES=1" in check.found


@on_card
def test_a_row_that_fails_is_an_answer(monkeypatch):
    """Guards against a doctor that dies of the driver it should report on."""

    def broken(device=None):
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    check = row("GPU sharing")
    assert not check.works and "initialization failed" in check.found and "torch.cuda.init()" in check.remedy
