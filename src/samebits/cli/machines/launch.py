"""`samebits launch`: a DistributedDataParallel script, unmodified, with equal weights at any number of processes."""

import os
import sys
import tempfile
from typing import Annotated

import typer

from samebits.errors import ConfigError

WORKER = "samebits.own_loop.patched.worker"
TURNS = "SAMEBITS_TURNS"  # see `own_loop/patched/turns.py`
Arguments = Annotated[
    list[str],
    typer.Argument(metavar="[FLAGS] SCRIPT [ARGUMENTS]", help="As for torchrun.", show_default=False),
]
# Flags of torchrun have values, which only its parser knows: all that follows is left to it.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(arguments: Arguments) -> int:
    """Start an unmodified DDP script, with equal weights in any world.

    Its flags are those of torchrun, and --global-batch N (samples of a step, over all processes), --micro-batch N
    (samples of one forward pass) and --seed N. For example: samebits launch --nproc-per-node 2 --global-batch 64
    --micro-batch 16 train.py --epochs 3
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from samebits.own_loop.ending import BATCH_SIZES

    parser = run.get_args_parser()
    for name in ("--global-batch", "--micro-batch", "--seed"):
        parser.add_argument(name, type=int, default=0)
    args = parser.parse_args(arguments)
    step, micro = args.global_batch, args.micro_batch
    if min(step, micro, args.seed) < 0 or bool(step) != bool(micro) or (micro and step % micro):
        raise ConfigError(
            f"--global-batch {step} and --micro-batch {micro} do not fit together, or --seed is less than 0",
            allowed="both, or none; the global batch is a multiple of the micro-batch",
            fix="Give both, such as --global-batch 64 --micro-batch 16.",
        )
    os.environ[BATCH_SIZES] = f"{step}:{micro}:{args.seed}"
    # Threads and hash seeds decide bits and orders already while the script sets up.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    args.training_script_args = [*["-m"] * args.module, args.training_script, *args.training_script_args]
    args.module, args.training_script = True, WORKER
    try:
        with tempfile.TemporaryDirectory(prefix="samebits-") as os.environ[TURNS]:
            run.run(args)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        message = first.message if isinstance(first.message, str) else ""
        # The text of an error of Samebits is enough; `ending.py` writes it with this line feed.
        print(message.strip() if message.startswith("\n") else failed, file=sys.stderr)
        return max(first.exitcode, 1)
    return 0
