"""A search has the same trials whichever of them ends first, and however often it is stopped."""

import json
import random
from pathlib import Path

import pytest

from samebits.extras import is_installed
from samebits.sweeps.search import Search, choose, until_pruned
from samebits.sweeps.state_file import SearchSpec, Sweep, TrialOutcome, read_sweep

pytestmark = pytest.mark.skipif(not is_installed("optuna"), reason="needs optuna")
SPACE = ["optim.lr=1e-4:1e-1:log", "optim.name=sgd,adam", "model.width=4:8"]
NUM_TRIALS, LAG, NUM_EVALUATIONS = 12, 3, 3


def _value(overrides: list[str], evaluation: int) -> float:
    """Stands for a training: a metric that follows from the settings alone."""
    lr = float(overrides[0].partition("=")[2])
    return 0.1 * evaluation + 1 / (1 + abs(lr - 0.01) * 100) + 0.1 * ("adam" in overrides[1])


def _evaluate(folder: Path, number: int, overrides: list[str], evaluation: int) -> None:
    run = folder / f"trial-{number + 1:04}"
    run.mkdir(exist_ok=True)
    record = {"kind": "eval", "step": 10 * evaluation, "epoch": evaluation, "top1": _value(overrides, evaluation)}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    if evaluation == NUM_EVALUATIONS:
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "best.json").write_text('{"metric": "top1", "better": "max"}', encoding="utf-8")
        (run / "result.json").write_text("{}", encoding="utf-8")


def _search(folder: Path, seed: int) -> Sweep:
    """Run a search in which trials side by side advance in a random order, and which is killed now and then."""
    folder.mkdir()
    draw = random.Random(seed)
    sweep = Sweep(["mnist/digits"], ["optim.lr"], [], search=SearchSpec(SPACE, NUM_TRIALS, LAG))
    sweep.write(folder)
    agenda, running = Search(sweep, folder), dict[int, int]()
    while len(sweep.outcomes) < NUM_TRIALS:
        for trial in agenda.candidates():
            if len(running) < LAG:
                records = folder / f"trial-{trial + 1:04}" / "metrics.jsonl"
                running.setdefault(trial, len(records.read_text().splitlines()) if records.exists() else 0)
                agenda.started(trial)
        number = draw.choice(sorted(running))
        running[number] += 1
        _evaluate(folder, number, sweep.trials[number], running[number])
        if draw.random() < 0.3:
            sweep = read_sweep(folder)
            agenda = Search(sweep, folder)
            running.clear()
            continue
        if agenda.is_pruned(number) or running[number] == NUM_EVALUATIONS:
            agenda.ended(number)
            del running[number]
    return sweep


def test_a_search_has_the_same_trials_in_any_order_of_ends_and_after_kills(tmp_path: Path) -> None:
    first, *others = (_search(tmp_path / str(seed), seed) for seed in range(3))
    for other in others:
        assert other.trials == first.trials
        assert other.outcomes == first.outcomes
    states = [outcome.state for outcome in first.outcomes.values()]
    assert states.count("pruned") > 0
    assert states.count("done") > NUM_TRIALS // 3
    assert len({tuple(trial) for trial in first.trials}) == NUM_TRIALS


def test_a_trial_below_the_median_is_pruned_and_failed_ones_are_ignored() -> None:
    spec = SearchSpec(["optim.lr=0.1:0.9"], 20, 1)
    good = TrialOutcome("done", [(1, 0.5), (2, 0.8)])
    history = [([f"optim.lr=0.{number}"], good) for number in range(1, 6)]
    history.append((["optim.lr=0.7"], TrialOutcome("failed", [], "why")))
    history.append((["optim.lr=0.8"], TrialOutcome("done", [(1, None)])))
    judged = {
        value: until_pruned(spec, history, ["optim.lr=0.6"], [(1, 0.6), (2, value)], "max") for value in (0.7, 0.9)
    }
    assert judged == {0.7: 2, 0.9: None}
    assert until_pruned(spec, history, ["optim.lr=0.6"], [(1, 0.6), (2, 0.9)], "min") == 1
    assert choose(spec, 7, history, "max") == choose(spec, 7, history, "max")
    assert choose(spec, 7, history, "max") != choose(spec, 8, history, "max")
