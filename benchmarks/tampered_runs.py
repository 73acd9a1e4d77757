"""What `samebits verify` finds, what it does not, and what it costs.

    python -m benchmarks.tampered_runs
    python -m benchmarks.tampered_runs --parts tampered audits --kinds "sample swapped" chain
    python -m benchmarks.tampered_runs --parts honest --honest 20 --commands 2

tampered: a hundred tampered runs of a tiny recipe, each verified with --all: found or not, and at which step.
audits: a thousand simulated audits by --sample of these runs, against the probability that verify states.
honest: runs trained on 1 to 4 processes, killed, resumed on others, verified on 1 to 3: none may differ.
costs: the record's share of a step, and a verification's share of training.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.verification_costs import cost_of_record, cost_of_verification
from samebits.provenance.record import STEPS_FILE
from samebits.replay.segments import choose, escape_probability
from samebits.replay.verify import Verdict
from tests.ranks.rank_pool import RankPool
from tests.runs import TINY, kill_session, samebits, start
from tests.verify_trials.honest import (
    RESUMED,
    explain,
    honest_trial,
    resumed_with,
    trust_in,
)
from tests.verify_trials.runs import prepare_process, train, verified
from tests.verify_trials.tampers import ANY, Tamper, tampers

PARTS = ("tampered", "audits", "honest", "costs")
NUM_AUDITS, SHARE = 1000, 0.4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", default=[""], help="beginnings of kinds of tampering; default: all")
    parser.add_argument("--honest", type=int, default=200, help="honest runs on the ranks of a pool")
    parser.add_argument("--commands", type=int, default=10, help="honest runs by the real commands")
    options = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    is_good = True
    with tempfile.TemporaryDirectory(prefix="tampered-runs-") as place:
        folder = Path(place)
        os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
        prepare_process()
        if {"tampered", "audits"} & set(options.parts):
            chosen = [each for each in tampers() if each.kind.startswith(tuple(options.kinds))]
            if not chosen:
                parser.error(f"no kind of tampering begins with {' or '.join(options.kinds)}")
            is_good &= report_tampered(chosen, folder, rows, has_audits="audits" in options.parts)
        if "honest" in options.parts:
            is_good &= report_honest(options.honest, options.commands, folder, rows)
        if "costs" in options.parts:
            is_good &= report_costs(folder, rows)
    print("\n| what | bar | measured |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0 if is_good else 1


def report_tampered(chosen: list[Tamper], folder: Path, rows: list[tuple[str, str, str]], *, has_audits: bool) -> bool:
    honest = folder / "honest"
    train(honest)
    assert verified(honest).is_verified
    found, right = 0, 0
    missed = set[str]()
    verdicts = []
    for number, tamper in enumerate(chosen):
        run = folder / f"tampered-{number}"
        tamper.make(honest, run)
        verdict = verified(run, **tamper.request)
        is_right = tamper.is_found(verdict)
        found += tamper.is_note or not verdict.is_verified
        right += is_right
        verdicts.append(verdict)
        if not is_right:
            missed.add(tamper.kind)
            print(
                f"WRONG {tamper.kind}, {tamper.name}: step {tamper.step}, {tamper.said!r} expected\n{explain(verdict)}"
            )
    kinds = Counter(each.kind for each in chosen)
    print("kinds:", ", ".join(f"{kind} ({number})" for kind, number in kinds.items()), flush=True)
    measured = f"{len(kinds) - len(missed)} of {len(kinds)}"
    rows.append(("kinds of forgeries found, or named as not stated", "all", measured))
    rows.append(("tampered runs found, or named as not stated", "all", f"{found} of {len(chosen)}"))
    with_step = sum(each.step != ANY for each in chosen)
    rows.append(
        ("with the right first step, where there is one", "all", f"{right - len(chosen) + with_step} of {with_step}")
    )
    return right == len(chosen) and (not has_audits or report_audits(verdicts, rows))


def report_audits(verdicts: list[Verdict], rows: list[tuple[str, str, str]]) -> bool:
    """Choose segments of the tampered runs by random challenges, and compare how often a changed one is among them.

    Without the last segment: it is in every choice, so a change of it is always found.
    """
    by_replay = [each for each in verdicts if set(each.chosen) - set(each.replayed) and not each.mismatches]
    changed_by_run = [set(each.chosen) - set(each.replayed) - {max(each.segments)} for each in by_replay]
    runs = [(verdict, changed) for verdict, changed in zip(by_replay, changed_by_run, strict=True) if changed]
    found, expected, variance = 0, 0.0, 0.0
    for number in range(NUM_AUDITS):
        verdict, changed = runs[number % len(runs)]
        chosen = choose(verdict.segments, SHARE, f"{verdict.root} {number}")
        found += bool(changed & set(chosen))
        probability = 1 - escape_probability(len(verdict.segments) - 1, len(chosen) - 1, len(changed))
        expected += probability
        variance += probability * (1 - probability)
    away = (found - expected) / variance**0.5
    measured = f"{found} found, {expected:.1f} expected ({away:+.1f} standard deviations)"
    rows.append((f"{NUM_AUDITS:,} audits of {SHARE:.0%} of the steps", "as the formula gives, within 3", measured))
    return abs(away) < 3


def honest_by_command(folder: Path, number: int) -> tuple[bool, str]:
    """Do the same by the real commands: every process of the run is killed once. Returns whether it is verified."""
    chance = random.Random(number)
    sizes = [chance.randint(1, 3) for _ in range(3)]
    run, at = folder / "run", chance.randrange(3, 15)
    settings = ["epochs=4", "checkpoint.every=2 steps", "checkpoint.keep_every=4 steps", "data.slow_s=0.02"]
    command = ["train", TINY, *settings, "--run-dir", run, "--procs"]
    process = start(*command, sizes[0], cwd=folder)
    try:
        log = run / STEPS_FILE
        while process.poll() is None and not (log.exists() and log.stat().st_size >= 56 + 72 * at):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        kill_session(process)
    time.sleep(0.5)
    resume = "auto" if any((run / "checkpoints").glob("step-*")) else "never"
    samebits(*command, sizes[1], "--resume", resume, cwd=folder)
    output = samebits("verify", run, "--all", "--procs", sizes[2], cwd=folder).stdout
    how = f"{sizes[0]} processes killed after {at} steps, {sizes[1]} resumed, {sizes[2]} verified"
    return "verified   every step of the run" in output, how


def report_honest(num_runs: int, num_commands: int, folder: Path, rows: list[tuple[str, str, str]]) -> bool:
    alarms = 0
    pool = RankPool(4)
    try:
        pool.run(1, trust_in)
        for number in range(num_runs):
            verdict, how = honest_trial(pool, folder / f"honest-{number}", number)
            # The last note names what no run compares: logs, recipe and times.
            if not verdict.is_verified or verdict.notes[1:] or verdict.changes:
                alarms += 1
                print(f"ALARM {number}: {how}\n{explain(verdict)}", flush=True)
    finally:
        pool.end()
    rows.append(("honest runs that were not verified", "0", f"{alarms} of {num_runs}"))
    changed = {setting: resumed_with(setting, folder / f"resumed-{place}") for place, setting in enumerate(RESUMED)}
    refused = [setting for setting, verdict in changed.items() if not verdict.is_verified]
    for setting in refused:
        print(f"ALARM resumed with {setting}\n{explain(changed[setting])}", flush=True)
    rows.append(("the same, each resumed with another setting", "0", f"{len(refused)} of {len(RESUMED)}"))
    failed = 0
    for number in range(num_commands):
        (folder / f"command-{number}").mkdir()
        is_verified, how = honest_by_command(folder / f"command-{number}", number)
        failed += not is_verified
        print(f"{'ok' if is_verified else 'ALARM'}: {how}", flush=True)
    rows.append(("the same by the real commands, with kill -9", "0", f"{failed} of {num_commands}"))
    return not alarms and not failed and not refused


def report_costs(folder: Path, rows: list[tuple[str, str, str]]) -> bool:
    is_good = True
    for name, num_steps in (("cnn", 300), ("resnet18-64", 10)):
        cost = cost_of_record(name, folder, num_steps)
        several = f"{cost['share_in_worlds']:.2%} on rank 0 of several processes; on/off pairs {cost['paired']:+.1%}"
        measured = f"{cost['share']:.2%} ({cost['record_us']:.0f} us of {cost['step_ms']:.1f} ms; {several})"
        rows.append((f"record's share of a step, {name}", "1%", measured))
        is_good &= cost["share"] <= 0.01
    rows.append(("record's bytes per step", "100", f"{cost['bytes']:.0f}"))
    cost = cost_of_verification(folder / "digits")
    trained = f"of {cost['training_s']:.1f} s of training, {cost['steps']:.0f} steps of digits"
    one = f"{cost['one_percent']:.2%} {trained}; {cost['one_percent_worst']:.2%} at worst"
    rows.append(("verifying 1% of the steps", "2%", one))
    rows.append(("verifying every step", "-", f"{cost['every']:.0%} {trained}"))
    rows.append(("each of two verifiers", "0.55 of one's time", f"{cost['two']:.3f}"))
    return is_good and cost["one_percent"] <= 0.02 and cost["two"] <= 0.55


if __name__ == "__main__":
    started = time.time()
    code = main()
    print(f"\n{time.time() - started:.0f} s")
    raise SystemExit(code)
