"""As PyTorch's DDP tutorial: a look at the first batch of each epoch, snapshots with weights and the last epoch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, snapshot_path):
        self.global_rank = int(os.environ["RANK"])
        self.train_data, self.optimizer, self.snapshot_path, self.epochs_run = train_data, optimizer, snapshot_path, 0
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(model)

    def _run_epoch(self, epoch):
        b_sz = len(next(iter(self.train_data))[0])
        print(f"[{self.global_rank}] Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
                torch.save(snapshot, self.snapshot_path)


def main(total_epochs, snapshot_path, batch_size=4):
    dist.init_process_group(backend="gloo")
    train_set, model = data(), torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(train_set)
    train_data = DataLoader(train_set, batch_size=batch_size, pin_memory=False, shuffle=False, sampler=sampler)
    Trainer(model, train_data, optimizer, snapshot_path).train(total_epochs)
    print_sha256(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), sys.argv[2])
