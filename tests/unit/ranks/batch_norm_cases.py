"""One process of `test_rank_options.py`: its share of a batch beside the whole one. Prints the differences."""

import copy
import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from samebits.ranks import sync_batch_norm

MOMENTUM = None if sys.argv[1] == "cumulative" else 0.1
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(3 * size + 1, 5, 4, 4) * 3 + 1
weight = torch.randn_like(x)
whole = nn.BatchNorm2d(5, momentum=MOMENTUM)
nn.init.normal_(whole.weight)
nn.init.normal_(whole.bias)
synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
mine = slice(0, 4) if rank == 0 else slice(1 + 3 * rank, 4 + 3 * rank)  # rank 0 has one sample more
if sys.argv[1] == "empty":
    mine = slice(0, 0) if rank == 1 else slice(0, 5) if rank == 0 else slice(5, len(x))
assert sync_batch_norm.is_synced(synced, x)
for _ in range(2):
    of_all, of_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    expected, found = whole(of_all), sync_batch_norm.forward(synced, of_mine)
whole.zero_grad()
(expected * weight).sum().backward()
(found * weight[mine]).sum().backward()
for parameter in synced.parameters():
    dist.all_reduce(parameter.grad)
pairs = [
    (found, expected[mine]),
    (of_mine.grad, of_all.grad[mine]),
    *((one.grad, other.grad) for one, other in zip(synced.parameters(), whole.parameters(), strict=True)),
    *zip(synced.buffers(), whole.buffers(), strict=True),
]
print(json.dumps([float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs]))
dist.destroy_process_group()
