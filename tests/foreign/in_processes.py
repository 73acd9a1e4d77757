"""Runs training scripts in real processes, as torchrun starts them, without importing torch anew for each.

    python -P tests/foreign/in_processes.py MODULE... < JSON lines, one for each start

Imports the modules that exist, then starts scripts. A start has `procs` processes with torchrun's environment
variables, or one without them if it is `alone`. `kill_at` kills the last rank by SIGKILL after that many steps of its
optimizer,
`kill_when` rank 0 when it has written that file; then the others are killed. Prints a JSON line for each start: exit
codes and output.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 300.0


def main() -> None:
    """Serve the starts on standard input."""
    # Before the processes are forked. The first optimizer of a process imports torch._dynamo, which takes seconds.
    for name in ("torch._dynamo", "samebits.own_loop.session", *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(start(json.loads(line), Path(folder))), flush=True)


def start(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one start to its end."""
    from samebits.cluster.address import ReservedPort

    reserved = ReservedPort()  # kept until the end: other tests look for a port at the same time
    port = reserved.renew()
    pids = [_fork(request, rank, port, folder) for rank in range(request["procs"])]
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
        is_over = time.monotonic() > end
        # As a launcher: the others of a process that has failed are ended.
        if is_over or any(codes.values()):
            for rank, other in enumerate(pids):
                if rank not in codes:
                    os.kill(other, signal.SIGKILL)
        if pid == 0:
            time.sleep(0.01)
    reserved.close()
    files = [folder / f"{rank}.txt" for rank in range(len(pids))]  # one that was ended at once has none
    texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
    return {"codes": [codes[rank] for rank in range(len(pids))], "texts": texts}


def _fork(request: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    atexit._clear()  # those of the parent, which delete its temporary folders
    try:
        with (folder / f"{rank}.txt").open("w", encoding="utf-8", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _run(request, rank, port)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict[str, Any], rank: int, port: int) -> None:
    import torch

    size = str(request["procs"])
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not (request["alone"] and size == "1"):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
    if request["kill_at"] and rank == request["procs"] - 1:
        _kill_after(request["kill_at"])
    if request["kill_when"] and rank == 0:
        _kill_after_writing(request["kill_when"])
    script = request["scripts"][min(rank, len(request["scripts"]) - 1)]  # one for all, or one for each rank
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def _kill_after(num_steps: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = []

    def count(*_: object) -> None:
        steps.append(1)
        if len(steps) == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def _kill_after_writing(path: str) -> None:
    replace = Path.replace

    def replace_and_kill(self: Path, target: Any) -> Path:
        result = replace(self, target)
        if str(target) == path:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = replace_and_kill  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
