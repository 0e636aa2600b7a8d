"""Every Python process of a notebook that is played on the pretend GPU is on it from the start, and off the network."""

import contextlib
import os
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[2] / "offline" / "sitecustomize.py"))
if os.environ.get("PRETEND_GPU_PROFILE") and "pip" not in sys.argv[:1]:
    from pretend_gpu.stage import set_the_stage

    _stack = contextlib.ExitStack()
    set_the_stage(os.environ["PRETEND_GPU_PROFILE"], _stack)
