"""Collective calls for `test_rank_options.py`: BACKEND [BATON]. Prints results, and a digest of weights."""

import hashlib
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from samebits.ranks import group
from samebits.ranks.devices import Baton

if sys.argv[1] == group.BACKEND:
    group.make_known(Baton(*sys.argv[2:]))
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
model = DistributedDataParallel(net, bucket_cap_mb=1 << 20)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
own = torch.Generator().manual_seed(rank)
for _ in range(3):
    x, y = torch.randn(8, 50, generator=own), torch.randint(10, (8,), generator=own)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
found: list[object] = [hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()]


def note(*tensors: torch.Tensor) -> None:
    found.append([each.tolist() for each in tensors])


def vector(value: float, length: int = 2) -> torch.Tensor:
    return torch.full((length,), float(value))


x = torch.arange(4.0) + rank
dist.all_reduce(x)
note(x)
dist.all_reduce(x, async_op=True).wait()
note(x)
x = torch.tensor([3, rank])
dist.all_reduce(x, op=dist.ReduceOp.MAX)
note(x)
every = [torch.empty(2) for _ in range(size)]
dist.all_gather(every, vector(rank))
note(*every)
flat = torch.empty(2 * size)
dist.all_gather_into_tensor(flat, vector(rank))
note(flat)
part = torch.empty(2)
dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) + rank)
note(part)
dist.reduce_scatter(part, [vector(each + rank) for each in range(size)])
note(part)
mixed = torch.empty(size)
dist.all_to_all_single(mixed, torch.arange(float(size)) + 10 * rank)
note(mixed)
dist.scatter(part, [vector(each) for each in range(size)] if rank == 0 else None)
note(part)
objects: list[object] = [None] * size
dist.all_gather_object(objects, {"rank": rank})
found.append(objects)
named = [rank]
dist.broadcast_object_list(named, 1)
found.append(named)
if rank == 0:
    dist.send(vector(7.0), 1)
if rank == 1:
    dist.recv(part, 0)
    note(part)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(part, group=pair)
    note(part)
dist.barrier()
print(json.dumps(found))
dist.destroy_process_group()
