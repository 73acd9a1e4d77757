"""The recipe of tiny_recipe.py on a processor that computes one wrong gradient on rank 1."""

import os
from dataclasses import replace

from torch import nn

from tests.e2e import tiny_recipe
from tests.e2e.tiny_recipe import PRESET, Config  # noqa: F401

WRONG_PASS = int(os.environ["WRONG_PASS"])  # backward passes, counting those of the start


class Wrong(nn.Module):
    num_passes = 0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        outputs = self.inner(inputs)
        if self.training and os.environ.get("RANK") == "1":
            Wrong.num_passes += 1
            if Wrong.num_passes == WRONG_PASS:
                outputs.register_hook(lambda gradient: gradient * 1.0001)
        return outputs


def build(config):
    parts = tiny_recipe.build(config)
    return replace(parts, model=Wrong(parts.model))
