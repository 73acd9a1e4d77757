"""Random kills of a run with cluster.recovery=in_step: how it ends, and how soon it continues.

    python -m benchmarks.kills --trials 200 --seed 7
    python -m benchmarks.kills --only 7042            # one trial again
    python -m benchmarks.kills --settings precision=bf16
    python -m benchmarks.kills --nodes 2 3 --trials 20   # processes and whole nodes of 2 or 3 launchers
    sudo python -m benchmarks.kills --nodes 2 3 --namespaces   # each launcher in a network namespace of its own

Each trial trains a small network for 34 steps on 2 to 6 processes. Processes are killed or stopped at a random moment:
in a step, several at once, while the others recover, while a replacement joins, in a save, a validation, after the last
step, or while the run is being built. At least one process survives. A trial passes if the final weights have the hash
of an undisturbed run, no step was repeated, survivors have kept their processes, each step has one record, and no
process, port, shared memory or temporary file is left. A process that is stopped for 0.3 s counts as lost. Trials with
several launchers are described in `node_trials.py`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.node_trials import LOSSES, draw_nodes, play_nodes
from tests.cluster.hosts import Host, hosts, why_not
from tests.faults.faults import SETTINGS
from tests.faults.kill_trials import MOMENTS, Outcome, draw, play
from tests.runs import TINY, samebits, weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="trial N has the seed 1000 * SEED + N")
    parser.add_argument("--only", type=int, nargs="*", help="seeds of single trials, to repeat them")
    parser.add_argument("--moments", nargs="*", choices=list(MOMENTS), help="only trials of these moments")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side; more than 1 makes times longer")
    parser.add_argument("--keep", type=Path, help="existing folder to which the files of failed trials are moved")
    parser.add_argument("--nodes", type=int, nargs="*", help="numbers of launchers to draw from; default: one launcher")
    parser.add_argument("--namespaces", action="store_true", help="with --nodes: a network namespace for each launcher")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seeds = given.only or [1000 * given.seed + number for number in range(given.trials)]
    if given.nodes:
        with tempfile.TemporaryDirectory(prefix="k") as place, _hosts(given, Path(place)) as hosts:
            return _run_nodes(seeds, given.nodes, given.settings, Path(place), hosts)
    trials = [trial for trial in map(draw, seeds) if not given.moments or trial.moment in given.moments]
    # A short path: that of a socket in it may not be long.
    with tempfile.TemporaryDirectory(prefix="k") as place:
        folder = Path(place)
        samebits(
            "train", TINY, *SETTINGS, *given.settings, "--procs", 1, "--run-dir", folder / "alone",
            cwd=folder,
        )  # fmt: skip
        wanted = weights(folder / "alone")

        def run(number: int) -> Outcome:
            own = folder / str(number)
            own.mkdir()
            outcome = play(trials[number], own, given.settings, wanted)
            (own / "output").write_text(outcome.output, encoding="utf-8")
            print(_line(outcome), flush=True)
            if outcome.faults and given.keep is not None:
                shutil.move(own, given.keep / str(trials[number].seed))
            return outcome

        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = list(pool.map(run, range(len(trials))))
    print("\n".join(["", *_table(outcomes)]))
    return int(any(outcome.faults for outcome in outcomes))


def _hosts(given: argparse.Namespace, folder: Path) -> AbstractContextManager[Sequence[Host]]:
    if not given.namespaces:
        return nullcontext([])
    if reason := why_not():
        raise SystemExit(reason)
    return hosts(max(given.nodes), folder)


def _run_nodes(
    seeds: Sequence[int], sizes: list[int], settings: list[str], folder: Path, places: Sequence[Host]
) -> int:
    """Run trials with several launchers, one after the other; return the exit code."""
    outcomes = []
    samebits("train", TINY, *SETTINGS, *settings, "--procs", 1, "--run-dir", folder / "alone", cwd=folder)
    for seed in seeds:
        outcome = play_nodes(draw_nodes(seed, sizes), folder / str(seed), settings, weights(folder / "alone"), places)
        outcomes.append(outcome)
        stages = " | ".join(f"{at:.2f}" for at in outcome.stages_s) or "-"
        faults = f"  FAILED: {'; '.join(outcome.faults)}\n{outcome.output}" if outcome.faults else ""
        print(f"{outcome.trial}  {stages} s  ({outcome.seconds:.0f} s){faults}", flush=True)
    print("\n| lost | nodes | trials | passed | steps repeated | next step done, median | worst |")
    print("|---|---|---|---|---|---|---|")
    for what in LOSSES:
        for size in sorted({*sizes}):
            found = [o for o in outcomes if (o.trial.what, o.trial.num_nodes) == (what, size)]
            times = [o.stages_s[2] for o in found if o.stages_s]
            passed, repeated = sum(not o.faults for o in found), sum(o.num_repeated for o in found)
            cells = f"{statistics.median(times):.2f} s | {max(times):.2f} s" if times else "- | -"
            print(f"| {what} | {size} | {len(found)} | {passed} | {repeated} | {cells} |")
    return int(any(outcome.faults for outcome in outcomes))


def _line(outcome: Outcome) -> str:
    stages = " | ".join(f"{at:.2f}" for at in outcome.stages_s) or "-"
    faults = f"  FAILED: {'; '.join(outcome.faults)}" if outcome.faults else ""
    return f"{outcome.trial}  {outcome.num_lost} lost, {stages} s  ({outcome.seconds:.0f} s){faults}"


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["| moment | trials | processes lost | passed | steps repeated |", "|---|---|---|---|---|"]
    for moment in [*MOMENTS, "all"]:
        found = [outcome for outcome in outcomes if moment in (outcome.trial.moment, "all")]
        if found:
            passed = sum(not outcome.faults for outcome in found)
            num_lost = sum(outcome.num_lost for outcome in found)
            repeated = sum(outcome.num_repeated for outcome in found)
            lines.append(f"| {moment} | {len(found)} | {num_lost} | {passed} | {repeated} |")
    lines += ["", "| after | trials | members named | group continues | next step done |", "|---|---|---|---|---|"]
    for name, is_stopped in (("SIGKILL", False), ("SIGSTOP", True)):
        # A second loss is always by SIGKILL.
        found = [
            outcome
            for outcome in outcomes
            if outcome.stages_s
            and (outcome.trial.how == "stop" and outcome.trial.moment not in ("recovery", "joining")) == is_stopped
        ]
        columns = list(zip(*(outcome.stages_s for outcome in found), strict=True))
        for what, measure in (("median", statistics.median), ("worst", max)) if found else ():
            cells = " | ".join(f"{measure(column):.2f} s" for column in columns)
            lines.append(f"| {name}, {what} | {len(found)} | {cells} |")
    failed = [outcome for outcome in outcomes if outcome.faults]
    return [*lines, "", *(f"FAILED {outcome.trial}: {'; '.join(outcome.faults)}" for outcome in failed)]


if __name__ == "__main__":
    raise SystemExit(main())
