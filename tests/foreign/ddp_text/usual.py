"""Classify short texts: an embedding that is frozen in the first epoch, a GRU, gradient scaling and ragged batches.

torchrun --nproc-per-node 2 tests/foreign/ddp_text/usual.py
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

import samebits

WORDS = ["the", "a", "red", "blue", "old", "bird", "boat", "sings", "sails", "sank", "flew", "under", "twice"]


def make_texts(count):
    """Return texts with a class: which of the words 'bird' and 'boat' is first, or neither."""
    rng, samples = random.Random(5), []
    for _ in range(count):
        tokens = [rng.randrange(len(WORDS)) for _ in range(rng.randint(3, 12))]
        known = [WORDS[token] for token in tokens if WORDS[token] in ("bird", "boat")]
        samples.append((tokens, 0 if not known else 1 + (known[0] == "boat")))
    return samples


def collate(batch):
    texts = [torch.tensor([token + 1 for token in tokens]) for tokens, _ in batch]
    return pad_sequence(texts, batch_first=True), torch.tensor([label for _, label in batch])


class TextClassifier(nn.Module):
    def __init__(self, dim=16, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 1, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(hidden, 3)

    def forward(self, tokens):
        states, _ = self.rnn(self.embedding(tokens))
        mask = (tokens > 0).unsqueeze(2)
        return self.head(self.drop((states * mask).sum(1) / mask.sum(1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    dataset = make_texts(400)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)

    net = TextClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20)
    model = DDP(net, find_unused_parameters=True)

    start = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        for name, part in (("net", net), ("optimizer", optimizer), ("scaler", scaler)):
            part.load_state_dict(state[name])
        start = state["epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        net.embedding.requires_grad_(epoch > 0)
        for tokens, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(tokens), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
        if dist.get_rank() == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, args.checkpoint)

    if dist.get_rank() == 0:
        print("sha256", samebits.weights_sha256(net.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
