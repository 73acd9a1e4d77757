"""The tiny recipe with a rank that reads forever, is stopped, or whose weights change, as set by STUCK."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.e2e import tiny_recipe
from tests.e2e.tiny_recipe import PRESET, Config, Pictures

__all__ = ["PRESET", "Config", "build"]


class Stuck(Pictures):
    def __init__(self, how, rank, file, pictures):
        self.__dict__.update(pictures.__dict__)
        self.how, self.is_guilty, self.file = how, os.environ.get("RANK") == rank, Path(file)
        self.num_reads = 0

    def batch(self, indices, keys):
        self.num_reads += len(indices) > 1  # not the single samples that are read at the start
        if self.is_guilty and self.num_reads > 17 and not self.file.exists():
            self.file.touch()
            while self.how == "sleeps":
                time.sleep(1000)
        if self.is_guilty and self.how == "stops in evaluation" and not torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().batch(indices, keys)


def build(config):
    parts = tiny_recipe.build(config)
    if "STUCK" not in os.environ:
        return parts
    how, rank, file = os.environ["STUCK"].split(",")
    if how == "stops in evaluation":
        return replace(parts, eval_data=lambda: Stuck(how, rank, file, parts.eval_data()))
    return replace(parts, train_data=lambda: Stuck(how, rank, file, parts.train_data()))
