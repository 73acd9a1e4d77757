"""Training processes that your own script starts with `torch.multiprocessing.spawn`.

python examples/spawn.py
"""

import sys

from torch.multiprocessing import spawn

from samebits import run_command


def train(rank: int, world_size: int) -> None:
    join = ["--init", "tcp://127.0.0.1:29500", "--rank", str(rank), "--world-size", str(world_size)]
    sys.exit(run_command(["train", "digits", *sys.argv[1:], *join]))


if __name__ == "__main__":
    spawn(train, args=(2,), nprocs=2)
