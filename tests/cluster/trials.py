"""Trials of runs under attack: a run of a random kind, a random attacker, and what has to hold at the end."""

import contextlib
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacker import DEEDS, MOST_S, Target, attack

from tests import warm_start
from tests.runs import SAMEBITS, TINY, environment, kill_session, own_port, result

KEY = "a secret that strangers do not know"
KINDS = ("procs", "procs", "nodes", "nodes", "init", "env", "env", "torchrun")
# Short waits, so that a run that cannot continue ends soon.
SETTINGS = (
    "epochs=1", "report.tensorboard=false", "cluster.join_timeout_s=40", "cluster.timeout_s=40",
    "cluster.stop_timeout_s=10", "watch.hang_timeout_s=30", "data.slow_s=0.1",
)  # fmt: skip
# How long a run may take from its start, attack and waits included, on a machine that is busy.
LIMIT_S = 300.0


@dataclass
class Trial:
    """What follows from a seed."""

    seed: int

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.kind = rng.choice(KINDS)
        self.size = rng.choice((2, 2, 3, 4)) if self.kind != "nodes" else 2
        self.key = KEY if self.kind in ("init", "env", "torchrun") and rng.random() < 0.5 else ""
        self.deeds = rng.sample(sorted(DEEDS), rng.choice((1, 2, 4, len(DEEDS))))
        self.start_s = rng.choice((0.0, 0.0, rng.uniform(0, 2), rng.uniform(0, 10)))
        self.num_deeds = rng.choice((3, 10, 40))
        self.can_stop = rng.random() < 0.3
        self.rng = rng

    def __str__(self) -> str:
        key = "signed" if self.key or self.kind in ("procs", "nodes") else "unsigned"
        return f"seed {self.seed}: {self.kind} {self.size} {key}, {' '.join(self.deeds)} from {self.start_s:.1f} s"


def begin(trial: Trial, folder: Path) -> tuple[list[subprocess.Popen[str]], list[int]]:
    """Start a run of a kind: its processes, and the ports at which they meet."""
    port = own_port()
    train = ["train", str(TINY), *SETTINGS, f"data.slow_while={folder}/slow", "--run-dir", str(folder / "run")]
    more = {"SAMEBITS_KEY": trial.key} if trial.key else {}
    size, host = trial.size, "127.0.0.1"
    commands: list[tuple[list[str], dict[str, str]]] = []
    if trial.kind == "procs":
        commands, ports = [([*SAMEBITS, *train, "--procs", str(size)], more)], []
    elif trial.kind == "nodes":
        words = ["--nodes", "2", "--procs", "1", "--rdzv-endpoint", f"{host}:{port}"]
        commands, ports = [([*SAMEBITS, *train, *words], more)] * 2, [port]
    elif trial.kind == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--nnodes", "1",
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", "-m"]  # fmt: skip
        commands, ports = [([*torchrun, *SAMEBITS[2:], *train], more)], [port]
    elif trial.kind == "env":
        at = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        commands = [([*SAMEBITS, *train], {**more, **at, "RANK": str(rank)}) for rank in range(size)]
        ports = [port]
    else:
        ports = [port]
        words = ["--init", f"tcp://{host}:{port}", "--world-size", str(size), "--rank"]
        commands = [([*SAMEBITS, *train, *words, str(rank)], more) for rank in range(size)]
    processes = []
    for number, (command, variables) in enumerate(commands):
        with (folder / f"said-{number}").open("w") as said:
            processes.append(
                warm_start.popen(command, cwd=folder, env=environment(**variables), stdout=said, stderr=said,
                                 text=True, start_new_session=True)
            )  # fmt: skip
    return processes, ports


def run_trial(trial: Trial, folder: Path, expected: str) -> dict[str, Any]:
    """Attack a run, and give back what became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow").touch()
    start = time.monotonic()
    processes, ports = begin(trial, folder)
    run_id = "run" if trial.kind == "nodes" else "none" if trial.kind == "torchrun" else ""
    attackers = []
    try:
        for number, process in enumerate(processes):
            target = Target(process.pid, ports, run_id, folder / "canary", can_stop=trial.can_stop)
            arguments = (trial.seed * 100 + number, target, trial.deeds, trial.start_s, trial.num_deeds,
                         folder.parent / f"seen-{number}.json")  # fmt: skip
            attackers.append(multiprocessing.get_context("fork").Process(target=attack, args=arguments))
            attackers[-1].start()
        for one in attackers:
            one.join(trial.start_s + MOST_S + 60)
        with contextlib.suppress(FileNotFoundError):
            (folder / "slow").unlink()
        codes = []
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, LIMIT_S - (time.monotonic() - start)))
            codes.append(process.returncode)
    finally:
        for one in attackers:
            if one.is_alive():
                one.kill()
            one.join()
        for process in processes:
            kill_session(process)
    said = [(folder / f"said-{number}").read_text(errors="replace") for number in range(len(processes))]
    return {
        "trial": str(trial), "codes": codes, "deeds": num_done(folder), "seconds": round(time.monotonic() - start, 1),
        "faults": faults(trial, folder, codes, said, expected),
    }  # fmt: skip


def num_done(folder: Path) -> int:
    """How many deeds got through to a port."""
    return sum(sum(json.loads(path.read_text()).values()) for path in folder.glob("done-*.json"))


def faults(trial: Trial, folder: Path, codes: Sequence[int | None], said: Sequence[str], expected: str) -> list[str]:
    """What should not have happened."""
    found = []
    if None in codes:
        found.append("did not end")
    if (folder / "canary").exists():
        found.append("code of the attacker was run")
    # torchrun prints the traceback of its own agent.
    if trial.kind != "torchrun":
        found += [f"traceback of process {number}" for number, text in enumerate(said) if "Traceback" in text]
    for number, (code, text) in enumerate(zip(codes, said, strict=True)):
        if code and code < 0 and -code != signal.SIGKILL:
            found.append(f"process {number} ended by signal {-code}")
        if code and not text.strip():
            found.append(f"process {number} ended without a text")
    has_result = (folder / "run" / "result.json").exists()
    if has_result and result(folder / "run")["weights_sha256"] != expected:
        found.append("another hash")
    if not any(codes) and None not in codes and not has_result:
        found.append("code 0 without a result")
    return found


def main(first: int, count: int, folder: Path, expected: str) -> None:
    """Many trials, one after the other; one line for each in trials.jsonl."""
    for seed in range(first, first + count):
        trial = Trial(seed)
        outcome = run_trial(trial, folder / str(seed), expected)
        with (folder / "trials.jsonl").open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
