"""Random crops of one long tensor, without a DataLoader, as small language models are trained."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(1337 + int(os.environ["RANK"]))
tokens = torch.arange(1000) % 7
model = DDP(torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    starts = torch.randint(len(tokens) - 9, (4,))
    x = torch.stack([tokens[i : i + 8] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 9] for i in starts])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print_sha256(model.module)
