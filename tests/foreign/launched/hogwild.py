"""Trains one model in several processes at once, which share its memory."""

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from samples_and_digest import data
from torch.utils.data import DataLoader


def train(rank, model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    model = torch.nn.Linear(6, 3)
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
