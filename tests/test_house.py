"""The house keeps its order: two packages, floors, no circles; and a fault planted in a copy of it is seen."""

from __future__ import annotations

import shutil

import house
import pytest


@pytest.fixture(scope="module")
def found():
    return house.imports()


def test_imports_go_down_the_floors(found):
    """A room that imports from beside or above it drags half the library along; a take-home package that imports the
    course cannot be taken home."""
    assert not house.upward(found), "\n".join(house.upward(found))


def test_no_circle_of_files(found):
    """Two files that import each other are one file that was cut, and load in one order alone."""
    assert not house.circles(found), house.circles(found)


@pytest.mark.parametrize(
    ("module", "limit"), [("llm_latency.engine.fast_decoder", 20), ("llm_latency.speculative.decoder", 30)]
)
def test_what_a_decoder_loads_is_read_in_an_evening(module, limit):
    """A reader of the decoder has to know what it stands on: `__init__` files count."""
    loaded = house.closure(module)
    assert len(loaded) <= limit, f"{module} loads {len(loaded)} modules:\n" + "\n".join(loaded)


PLANTED = {
    "upward": ("from llm_latency.engine import FastDecoder\n", "floor 4 is not below floor 1"),
    "in_a_function": ("def late():\n    from llm_latency import quality\n", "floor 5 is not below floor 1"),
    "by_name": ("import importlib\nimportlib.import_module('llm_latency.models')\n", "floor 2 is not below floor 1"),
    "beside": ("import llm_latency.sampling\n", "floor 1 is not below floor 1"),
    "for_types": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llm_latency.models import profiles\n",
        "floor 2 is not below floor 1",
    ),
    "the_course": ("def late():\n    from every_millisecond import request\n", "knows nothing of the course"),
    "a_new_room": ("from llm_latency.attic import chest\n", "'attic' stands on no floor"),
}
ATTIC = {
    "__init__.py": "from {package}.attic.chest import key\n",
    "chest.py": "key = 1\ndef late():\n    from {package} import cellar\n",
    "box.py": "import torch\n",
    "a.py": "from {package}.attic import b\n",
    "b.py": "import {package}.attic.c as c\n",
    "c.py": "def late():\n    from . import a\n    return a\n",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A copy of lib/ with every fault planted in it, and its imports."""
    lib = tmp_path_factory.mktemp("lib")
    for package in (house.TAKE_HOME, house.COURSE):
        shutil.copytree(
            house.LIB / package,
            lib / package,
            ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
        )
        (lib / package / "cellar.py").touch()
        (lib / package / "attic").mkdir()
        for name, text in ATTIC.items():
            (lib / package / "attic" / name).write_text(text.format(package=package))
    for name, (text, _) in PLANTED.items():
        (lib / "llm_latency" / "timing" / f"planted_{name}.py").write_text(text)
    return lib, house.imports(lib)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_is_caught(planted, name):
    """A rule that is never broken may be a rule that is never read."""
    wrong = [line for line in house.upward(planted[1]) if f".planted_{name}:" in line]
    assert wrong and all(PLANTED[name][1] in line for line in wrong)


@pytest.mark.parametrize("package", [house.TAKE_HOME, house.COURSE])
def test_a_planted_circle_is_caught(planted, package):
    """Through three files, one of them by a relative import in a function: no two of them import each other."""
    assert [f"{package}.attic.{name}" for name in "abc"] in house.circles(planted[1])


def test_what_an_import_loads(planted):
    """A closure that forgets the packages around a module, or counts what a function would import later."""
    attic = "llm_latency.attic"
    assert house.closure(f"{attic}.box", planted[0]) == ["llm_latency", attic, f"{attic}.box", f"{attic}.chest"]
    with pytest.raises(ValueError, match=r"no module 'llm_latency\.nowhere'"):
        house.closure("llm_latency.nowhere", planted[0])
