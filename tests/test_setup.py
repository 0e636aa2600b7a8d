"""The set-up files agree with each other, and the README's commands exist."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads no TOML without tomli")

ROOT = Path(__file__).resolve().parents[1]


def pyproject_list(start: str) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split(f"\n{start} = [", 1)[1].split("\n]", 1)[0]
    return re.findall(r'^\s*"(.+)",$', block, re.MULTILINE)


def extra(name: str) -> list[str]:
    """An extra of one line."""
    return re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1])


INSTALLED = [*pyproject_list("dependencies"), *pyproject_list("dev"), *extra("export"), *extra("serve")]


def test_environment_yml_has_the_same_dependencies():
    """A conda user must get what a pip user gets."""
    lines = re.findall(r'^ {6}- "(.+)"$', (ROOT / "environment.yml").read_text(), re.MULTILINE)
    assert lines == INSTALLED


SYSTEMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    "macos": {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"},
    "windows": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", ["3.10.13", "3.11.2", "3.11.7", "3.12.1", "3.13.0", "3.14.0"])
def test_the_lock_names_one_version_of_every_direct_dependency(python, system):
    """A lock made with one Python ended the set-up on another: Debian 12's 3.11.2 has no soupsieve 4.1.3 .

    And a dependency that is forgotten in the lock floats to whatever is newest.
    """
    here = SYSTEMS[system] | {"python_version": ".".join(python.split(".")[:2]), "python_full_version": python}
    locked: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            pinned = Requirement(line)
            if pinned.marker is None or pinned.marker.evaluate(here):
                locked.setdefault(canonicalize_name(pinned.name), []).append(str(pinned.specifier))
    for requirement in map(Requirement, INSTALLED):
        if requirement.marker is None or requirement.marker.evaluate(here):
            found = locked.get(canonicalize_name(requirement.name))
            assert found and len(found) == 1 and found[0].startswith("=="), f"{requirement.name}: {found}"
            assert requirement.specifier.contains(found[0].removeprefix("==")), f"{requirement}: {found[0]}"
    assert locked["torch"] == ["==2.13.0"]
    if system == "linux":  # what torch's own wheel with CUDA asks for; another version ends the set-up
        assert locked["triton"] == ["==3.7.1"]


def test_flash_attn_is_an_extra_and_never_fatal():
    """flash-attn fails to build without a CUDA toolkit (cases.md 32): no default install may ask for it."""
    assert not any("flash" in line for line in INSTALLED)
    assert not re.search(r"^\s*- .*flash", (ROOT / "environment.yml").read_text(), re.MULTILINE)
    assert re.search(r'^gpu = \[.*"flash-attn', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", ["lab", "test", "soak", "run", "lint", "exercises", "peers", "gpu"])
def test_the_makefile_has_the_promised_targets(target):
    """The README's commands must exist, and each must set up what it needs."""
    match = re.search(rf"^{target}:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match and "$(READY)" in match[1]


def test_clean_removes_the_stamp_first():
    """A clean that was interrupted left a stamp beside half an environment: `make lab` then set up nothing."""
    assert re.search(r"^clean:\n\trm -rf \$\(READY\) ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_calls_the_readmes_command():
    """CI must check what a user runs, not a path of its own."""
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-2:] == ["make test", "make test-long"]  # the README names both


SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".venv-peers",
    "__pycache__",
    ".ipynb_checkpoints",
    ".hypothesis",
    ".pytest_cache",
    ".ruff_cache",
    "run",
}
TEXT = {".py", ".md", ".toml", ".yml", ".cfg", ".ipynb", ".json", ".lock", ".j2", ".txt", ""}


def text_files() -> list[Path]:
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and not name.endswith(".egg-info")]
        found += [Path(folder) / name for name in names if Path(name).suffix in TEXT and name != ".git"]
    return found


def test_no_absolute_path_and_no_name_of_a_package_host():
    """A path of the author's machine works on no other; an index's host name breaks behind a mirror."""
    needles = re.compile("/" + r"(root|home|work|Users)/\w|" + "py" + r"pi\.org|" + "pythonhost" + r"ed\.org")
    offences = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in text_files()
        if path.name != "LICENSE" and (match := needles.search(path.read_text(encoding="utf-8", errors="ignore")))
    ]
    assert offences == []


def test_the_take_home_package_asks_for_no_more_than_the_course():
    """`pip install ./lib` must work without jupyter, nbgrader, matplotlib or typer, in the course's own versions."""
    with (ROOT / "lib" / "pyproject.toml").open("rb") as file:
        take_home = tomllib.load(file)["project"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in take_home["dependencies"]}
    assert names == {"torch", "transformers", "platformdirs", "filelock"}
    extras = [line for lines in take_home["optional-dependencies"].values() for line in lines]
    assert set(take_home["dependencies"]) | set(extras) <= set(pyproject_list("dependencies"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert take_home["version"] == tomllib.load(file)["project"]["version"]


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_the_take_home_package_carries_the_licence(name):
    """Whoever gets the weights gets their licence: a wheel of lib/ alone must hold both files, and the same text."""
    assert (ROOT / "lib" / name).read_text() == (ROOT / name).read_text()


def test_the_evenings_reading_is_twelve_files_and_short():
    """A reading list that grows is read by nobody, and one that names a file that is gone by nobody twice."""
    listed = re.findall(r"\]\((lib/llm_latency/[\w/]+\.py)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(listed) == len(set(listed)) == 12
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in listed) <= 2500
