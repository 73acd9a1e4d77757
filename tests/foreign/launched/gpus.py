"""A script that needs a GPU for each process, and asks torch for everything that such scripts ask."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def work(gpu: int, num_gpus: int, address: str) -> None:
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=address, world_size=num_gpus, rank=gpu)
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == gpu
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    data = TensorDataset(torch.randn(32, 3, 8, 8), torch.arange(32) % 4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=1, pin_memory=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(gpu)
    model = DistributedDataParallel(net, device_ids=[gpu], output_device=gpu)
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    device = torch.device("cuda", gpu)
    assert (device.type, torch.accelerator.current_accelerator().type) == ("cuda", "cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    scaler = torch.amp.GradScaler("cuda", enabled=True)
    sampler.set_epoch(0)
    for x, y in loader:
        x = x.cuda(gpu, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.cuda.synchronize()
    end.record()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert start.elapsed_time(end) >= 0.0
    dist.barrier(device_ids=[gpu])
    if gpu == 0:
        torch.save({"net": net.state_dict(), "random": torch.cuda.get_rng_state_all()}, "gpus.pt")
        found = torch.load("gpus.pt", map_location=f"cuda:{gpu}")["net"]
        assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
        print(f"{total.item():.4f}, {torch.cuda.max_memory_allocated()} bytes of {torch.cuda.get_device_name(gpu)}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    count = torch.cuda.device_count()
    mp.spawn(work, nprocs=count, args=(count, "tcp://127.0.0.1:23456"))
