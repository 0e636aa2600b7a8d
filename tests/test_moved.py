"""An import of the first edition fails with the name's new place."""

from __future__ import annotations

import importlib

import pytest

from llm_latency import _moved


@pytest.mark.parametrize(("old", "new"), _moved.MOVED.items())
def test_every_new_place_is_there(old, new):
    """Guards against a table that sends readers to a place that is no more."""
    module, _, name = new.rpartition(".")
    try:
        importlib.import_module(new)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", _moved.MOVED)
def test_the_old_name_is_refused_with_the_new_one(old):
    """Guards against a ModuleNotFoundError that leaves a reader to search, and against an old name that still works."""
    room, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match="is now every_millisecond"):
        importlib.import_module(old)
    with pytest.raises(ImportError, match="is now every_millisecond"):
        exec(f"from {room} import {name}", {})


def test_what_lay_below_a_room_is_refused_with_the_rooms_new_place():
    """Guards against a message for the room alone: its files were imported, too."""
    with pytest.raises(ImportError, match=r"llm_latency\.claims is now every_millisecond\.claims"):
        importlib.import_module("llm_latency.claims.ledger")


def test_a_name_that_never_was_fails_as_ever():
    """Guards against a finder that answers for everything."""
    with pytest.raises(ModuleNotFoundError, match="no_such_room"):
        importlib.import_module("llm_latency.no_such_room")
