"""A script that forgets to initialize a layer, which then has what another tensor left in the memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
del (left := [torch.rand(256, 256) for _ in range(64)])[:]
with torch.device("meta"):
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4))
net.to_empty(device="cpu")
net[1].reset_parameters()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.ones(4, 256)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert torch.utils.deterministic.fill_uninitialized_memory is False, "steps are as fast as they were"
print(f"loss {loss.item()}")
