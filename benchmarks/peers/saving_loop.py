"""An own loop that saves each epoch, for `ckpt-chaos`, which ends it before and within each write of a file.

    pip install --target ckpt-chaos ckpt-chaos
    PYTHONPATH=ckpt-chaos python -m ckpt_chaos run --max-points 10 --work chaos \\
        --step-regex 'resumed at step (\\d+)' --result-file '{out}/final.pt' -- \\
        python benchmarks/peers/saving_loop.py '{out}'

A run: --result-file '{out}/run/weights.safetensors' -- samebits train digits --run-dir '{out}/run' --resume auto
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS = 4


def save(state: Any, path: Path) -> None:
    """Save under another name first: a file of the name is whole."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(state, partial)
    os.replace(partial, path)


def main(out: Path) -> None:
    out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = samebits.exact(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True), global_batch=16
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        for name, state in torch.load(checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
        print("resumed at step", loader.step, flush=True)
    while loader.epoch < EPOCHS:
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    save(model.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
