"""A small exact loop in which something happens on rank 1.

torchrun --nproc-per-node 2 tests/foreign/watched.py sleep
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.own_loop import current

TIMEOUTS_S = {"sleep": 4.0, "pause": 10.0, "validation": 4.0}
what = sys.argv[1]
if what == "late":
    current.JOIN_TIMEOUT_S = 2.0
dist.init_process_group("gloo")
happens = dist.get_rank() == 1
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
if what == "late" and happens:
    time.sleep(1000)
global_batch = 32 if what == "settings" and happens else 16
_, _, loader = samebits.exact(model, optimizer, data, global_batch=global_batch, hang_timeout_s=TIMEOUTS_S.get(what))
for _ in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        if what == "nan" and happens and loader.step == 1:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        if what == "validation" and loader.step == 2:  # on both ranks, longer than the timeout
            end = time.monotonic() + 12
            while time.monotonic() < end:
                model(x)
                time.sleep(0.1)
        if what == "sleep" and happens and loader.step == 2:
            time.sleep(1000)
    if what == "pause":  # longer than the timeout, on one rank, outside of the loop
        time.sleep(25 * happens)
    if what == "drift" and happens:
        with torch.no_grad():
            model.bias += 1e-6
print("sha256", samebits.weights_sha256(model.state_dict()))
dist.destroy_process_group()
