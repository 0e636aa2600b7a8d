"""Settings of the property tests: the same examples at every run, or, for a soak, ten times as many and other ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PROPERTY_EXAMPLES_FACTOR", "1"))


def property_settings(examples: int, **options: object) -> settings:
    """`settings` for so many examples. Without a deadline: a busy machine is no fault of the code."""
    return settings(
        max_examples=examples * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        suppress_health_check=list(HealthCheck),
        **options,
    )
