"""Fails on one rank, or asks for another world than the launcher's."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if sys.argv[1] == "world":
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1234", rank=0, world_size=1)
elif sys.argv[1] == "children":

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1234", rank=rank, world_size=2)

    processes = [mp.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
elif sys.argv[1] == "spawn":
    mp.spawn(print, nprocs=5)
else:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("no such class")
    dist.all_reduce(torch.ones(1))
