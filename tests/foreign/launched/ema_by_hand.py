"""A moving average of the weights by hand: a class, a copy of the model, a dict, or a copy from some pass on."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if sys.argv[1] == "class" else 0.0)
average = copy.deepcopy(model.module)


class ModelEma:
    def __init__(self, model):
        self.module = copy.deepcopy(model)
        with torch.no_grad():
            self.module.bias += dist.get_rank()  # as with a seed of each rank

    @torch.no_grad()
    def update(self, model):
        for old, new in zip(self.module.parameters(), model.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)


ema = ModelEma(model.module)
shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
train_set = data(48)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
for number, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model.cpu()  # changes nothing, and sets each parameter's data
    if sys.argv[1] == "class":
        ema.update(model.module)
    elif sys.argv[1] == "copy":
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
    elif sys.argv[1] == "dict":
        for name, parameter in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * parameter.data
    elif number > 0:
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)
            old.data = old.data * 1.0
print_sha256(model.module, ema.module)
