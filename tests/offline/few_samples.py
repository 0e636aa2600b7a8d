"""One sample in place of ten: for runs of the notebooks that look at what they say and not at their figures.

`make test` sets LLM_LATENCY_TEST_SAMPLES; sitecustomize.py beside this file then imports it into every process,
notebook kernels and their children included. The timer itself knows nothing of it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys

MOST = int(os.environ["LLM_LATENCY_TEST_SAMPLES"])
COUNTS = {"llm_latency.timing.measure": "repeats", "llm_latency.timing.compare": "rounds"}
CONSTANTS = {
    "every_millisecond.notebook.bar": {"REPEATS": 1},  # answers of which the bar is the median
    "every_millisecond.subject": {  # of the diagnosis
        "SLOW_MS": 0.0,  # what takes longer is measured once
        "QUALITY_TOKENS": 32,  # of text that each format is scored on
    },
}


def limited(function, count: str):
    """A measuring function that takes at most `MOST` samples after at most one warm-up, whatever it is asked for."""

    @functools.wraps(function)
    def few(*args, **options):
        asked = {name: options.get(name, function.__kwdefaults__[name]) for name in (count, "warmup")}
        for name, most in ((count, MOST), ("warmup", 1)):
            if type(asked[name]) is int:  # what is no count is the function's own to refuse
                options[name] = min(asked[name], most)
        return function(*args, **options)

    return few


class Limiter(importlib.abc.MetaPathFinder):
    """Finds the modules where everybody does, and limits their function or constant once they are loaded."""

    def find_spec(self, name, path, target=None):
        if name not in COUNTS and name not in CONSTANTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for constant, value in CONSTANTS.get(name, {}).items():
                getattr(module, constant)  # one that is renamed would be limited no more, unseen
                setattr(module, constant, value)
            if name in CONSTANTS:
                return
            function = name.rpartition(".")[2]
            setattr(module, function, limited(getattr(module, function), COUNTS[name]))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Limiter())
