"""A worker of the loader that is still starting: it writes its process id, and waits."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def begin(number):
    path = Path(sys.argv[1], f"{dist.get_rank()}.pid")
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(float(sys.argv[2]))


dist.init_process_group("gloo")
for _ in DataLoader(TensorDataset(torch.ones(4, 2)), num_workers=1, worker_init_fn=begin):
    pass
