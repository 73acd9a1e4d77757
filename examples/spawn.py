"""Training processes that a script of one's own starts, as the tutorials do with mp.spawn.

python examples/spawn.py
"""

import sys

from torch.multiprocessing import spawn

from lockstep.cli.main import run


def work(rank: int, world_size: int) -> None:
    join = ["--init", "tcp://127.0.0.1:29500", "--rank", str(rank), "--world-size", str(world_size)]
    sys.exit(run(["train", "digits", *sys.argv[1:], *join]))


if __name__ == "__main__":
    spawn(work, args=(2,), nprocs=2)
