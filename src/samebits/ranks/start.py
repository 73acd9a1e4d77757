"""The options of `samebits launch`, and the start of its ranks. The fork server imports torch before this process does.

A script is started as torchrun would start it with N processes, on whatever machines and GPUs there are. One that
trains without a process group is started again as one rank: more of them would train a model each.
"""

import argparse
import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from samebits import scratch
from samebits.config.schema import ClusterConfig
from samebits.cores import num_cores, visible_gpus
from samebits.errors import ConfigError
from samebits.launch import forkserver
from samebits.launch.start import DEFAULT_PORT, rendezvous_of, with_port
from samebits.process_range import MAX_PROCS, ProcessRange, RendezvousConfig

if TYPE_CHECKING:
    from samebits.ranks.script import Script

PRELOAD = ("torch._dynamo", "samebits.ranks.script")
# With several ranks a core, the launcher beside them may not run for seconds. It does not see either when a script has
# begun to train, from where on its connections would report a lost machine.
NODE_TIMEOUT_S = 60.0
# Loaded once for all ranks, if the script names them.
_USUAL = ("torchvision", "PIL.Image", "sklearn", "cv2", "timm")
EXACT_LINES = """\
          +import samebits
          +model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=64, micro_batch=16)
           for x, y in loader:                  # the loop stays as it is
               ...
          +torch.save({..., "loader": loader.state_dict()}, path)"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="Read the flags in: samebits launch --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="samebits launch", add_help=False, allow_abbrev=False)
    numbers = (
        "--as", "--nnodes", "--max-restarts", "--seed", "--master-port", "--node-rank",
    )  # fmt: skip
    texts = (
        "--nproc-per-node", "--ranks", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend", "--master-addr", "--log-dir",
        "--local-ranks-filter",
    )  # fmt: skip
    for name in (*numbers, *texts):
        other = name.replace("-", "_").replace("__", "--")
        parser.add_argument(name, other, type=int if name in numbers else str)
    parser.set_defaults(log_dir="", local_ranks_filter="", seed=0, max_restarts=0)
    parser.add_argument("-t", "--tee", default="")
    for names in (
        ("-m", "--module"),
        ("--standalone",),
        ("--dry-run", "--dry_run"),
        ("--cuda-on-cpu",),
    ):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--trace", default="", help=argparse.SUPPRESS)  # of `samebits check`
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def start(arguments: Sequence[str], report: Callable[[str], None]) -> int:
    """Start the ranks of a script by the command's arguments, and return the exit code.

    Args:
        arguments: Flags, the script and its own arguments.
        report: Called with a text for the user.

    Raises:
        ConfigError: An option is wrong, or there is no such script.
    """
    given = _parser().parse_args(list(arguments))
    nnodes = given.nnodes or (len(given.ranks.split(",")) if given.ranks else 1)
    shares = _shares(given, nnodes)
    here = shares[given.node_rank or 0]
    if given.seed < 0 or given.max_restarts < 0:
        raise ConfigError("--seed or --max-restarts is less than 0", fix="Give 0 or more.")
    text = ""
    if not given.module:
        try:
            text = Path(given.script).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(
                f"{given.script} cannot be read: {error.strerror}",
                fix="Give the path of a script: train.py",
            ) from None
    forkserver.prepare([*PRELOAD, *(name for name in _USUAL if name.split(".")[0] in text)])
    from samebits.ranks.script import FIRST, NO_GROUP, Script

    if given.log_dir:
        Path(given.log_dir).mkdir(parents=True, exist_ok=True)
    with scratch.scratch_folder(Path(tempfile.gettempdir())) as folder:
        script = Script(
            given.script, given.arguments, given.module, given.seed, _shown(given), given.log_dir,
            () if given.cuda_on_cpu else tuple(visible_gpus()), str(folder), given.dry_run, given.trace,
            given.cuda_on_cpu,
        )  # fmt: skip
        nodes = _rendezvous(given, nnodes, sum(shares)) if nnodes > 1 else None
        if not given.node_rank:
            report(start_line(sum(shares), here, script.gpus, nnodes))
        code = _run(script, here, given.max_restarts, nodes)
        if code != NO_GROUP:
            return code
        report(
            f"{given.script} trains without a process group: it runs again as one rank (--as 1). To spread it over "
            f"processes, with equal bits on any number (docs/own-loop.md):\n{EXACT_LINES}"
        )
        if not (folder / FIRST).exists():
            return 0  # on the machine of rank 0
        return _run(script, 1, given.max_restarts, None)


def _run(
    script: "Script", num_ranks: int, max_restarts: int, nodes: RendezvousConfig | None
) -> int:
    from samebits.launch.launch import launch
    from samebits.ranks.script import run_script

    timeout_s = ClusterConfig().stop_timeout_s
    return launch(
        num_ranks, run_script, (script,), max_restarts=max_restarts, nodes=nodes, stop_timeout_s=timeout_s,
        preload=PRELOAD, fix="Start the same command again; --max-restarts N does so automatically.",
    )  # fmt: skip


def start_line(num_ranks: int, here: int, gpus: Sequence[str], nnodes: int = 1) -> str:
    """Describe how ranks run, and what that costs."""
    places, kind = (len(gpus), "GPU") if gpus else (num_cores(), "core")
    where = f"{places} {kind}{'s' * (places > 1)}"
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    processes = f"{num_ranks} process{'es' * (num_ranks > 1)}"
    if nnodes > 1:
        return f"{ranks} on {nnodes} machines, {here} of them on {where} here, as torchrun with {processes}"
    slower = ""
    if here > places:
        times = f"{here / places:.1f}".removesuffix(".0")
        slower = f"; a step takes about {times} times as long as with {here} {kind}s"
    return f"{ranks} on {where}, as torchrun with {processes}{slower}"


def _shares(given: argparse.Namespace, nnodes: int) -> list[int]:
    """Return how many ranks each machine has."""
    num_ranks = vars(given)["as"]
    if given.ranks:
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", given.ranks) or "0" in given.ranks.split(","):
            raise ConfigError(
                f"--ranks is {given.ranks!r}",
                allowed="a number for each machine: 6,2",
                fix="Give them.",
            )
        shares = [int(each) for each in given.ranks.split(",")]
    elif given.nproc_per_node:
        kinds = {
            "gpu": len(visible_gpus()),
            "cpu": num_cores(),
            "auto": len(visible_gpus()) or num_cores(),
        }
        share = kinds.get(given.nproc_per_node, given.nproc_per_node)
        if not str(share).isdecimal() or not int(share):
            raise ConfigError(
                f"--nproc-per-node is {given.nproc_per_node!r}",
                allowed="a number, cpu, gpu or auto",
                fix="Give one.",
            )
        shares = [int(share)] * nnodes
    else:
        whole, rest = divmod(1 if num_ranks is None else num_ranks, nnodes)
        shares = [whole + (number < rest) for number in range(nnodes)]
    if len(shares) != nnodes or (num_ranks is not None and sum(shares) != num_ranks):
        raise ConfigError(
            f"{' + '.join(map(str, shares))} ranks on {nnodes} machine{'s' * (nnodes > 1)}, and --as is {num_ranks}",
            fix="Give --as alone, or --nnodes and --ranks with one number for each machine.",
        )
    if min(shares) < 1 or max(shares) > MAX_PROCS:
        raise ConfigError(
            f"{sum(shares)} ranks on {nnodes} machines",
            allowed=f"1 to {MAX_PROCS} on each",
            fix="Set --as.",
        )
    if not 0 <= (given.node_rank or 0) < nnodes:
        raise ConfigError(
            f"--node-rank is {given.node_rank}",
            allowed=f"0 to {nnodes - 1}, as there are {nnodes} machines",
            fix="Number the machines from 0, or set --nnodes.",
        )
    if len({*shares}) > 1 and given.node_rank is None:
        raise ConfigError(
            f"the machines have {', '.join(map(str, shares))} ranks, and --node-rank is missing",
            fix="Give each machine its own --node-rank, counted from 0.",
        )
    return shares


def _shown(given: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the ranks whose output is shown; None: all, with their ranks."""
    if given.tee:
        return None
    ranks = given.local_ranks_filter or "0"
    if not re.fullmatch(r"\d+(,\d+)*", ranks):
        raise ConfigError(
            f"--local-ranks-filter is {ranks!r}",
            allowed="ranks, such as 0,3",
            fix="Give them, or --tee 3 for all.",
        )
    return tuple(map(int, ranks.split(",")))


def _rendezvous(given: argparse.Namespace, nnodes: int, num_ranks: int) -> RendezvousConfig:
    """Return where the launchers of the machines meet."""
    endpoint = given.rdzv_endpoint
    if given.master_addr:
        endpoint = f"{given.master_addr}:{given.master_port or DEFAULT_PORT}"
    if not endpoint:
        raise ConfigError(
            f"--nnodes {nnodes} was given without --rdzv-endpoint",
            fix="On all machines, add the same --rdzv-endpoint HOST:PORT, where HOST is one of them.",
        )
    run_id = given.rdzv_id or "launch"
    # The launchers find their key there, where they share a disk: a folder for each run, gone when it ends.
    place = Path(given.script).absolute().parent if not given.module else Path.cwd()
    digest = hashlib.sha256(f"{endpoint} {run_id}".encode()).hexdigest()[:12]
    return rendezvous_of(
        ClusterConfig(node_timeout_s=NODE_TIMEOUT_S),
        size=ProcessRange(nnodes, nnodes),
        endpoint=with_port(endpoint),
        run_id=run_id,
        rank=given.node_rank,
        folder=place / f".launch-{digest}",
        has_own_id=True,
        shared={
            "ranks": str(num_ranks),
            "seed": str(given.seed),
            "script": Path(given.script).name,
        },
    )
