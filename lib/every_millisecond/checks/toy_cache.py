"""A quantised cache as small as it gets, for exercises: learners write what fills and crops it."""

from __future__ import annotations

import torch


class Values:
    """The values of one head: old tokens as INT8 codes with a scale each, the newest `residual` exactly."""

    def __init__(self, residual, channels):
        self.residual = residual
        self.codes = torch.zeros(0, channels, dtype=torch.int8)  # [old, channels]
        self.scales = torch.zeros(0, 1)  # [old, 1]
        self.exact = torch.zeros(0, channels)  # [at most residual, channels]

    def read(self):
        """All tokens, oldest first: [old + exact, channels]."""
        return torch.cat([self.codes * self.scales, self.exact])
