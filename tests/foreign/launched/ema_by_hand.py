"""A moving average of the weights by hand, in a dict of its own or in a copy of the model."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = copy.deepcopy(model.module)
shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
train_set = data(48)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if sys.argv[1] == "copy":
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
    else:
        for name, parameter in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * parameter.data
print_sha256(model.module)
