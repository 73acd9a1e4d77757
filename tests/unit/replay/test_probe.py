"""What the probes of `samebits check` find without any trial, and which cause is named first."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import SamebitsError
from samebits.replay.compare import EVALUATION, FORWARD, SAMPLES, TraceDifference
from samebits.replay.judge import Finding, Outcome, judge
from samebits.replay.probe import probe
from samebits.replay.sources import MERGE, RANK, Suspect
from samebits.replay.state import user_modules
from samebits.replay.trial import Trial
from tests.check_faults import MARK, Fault, source_of

# What the module keeps: how it begins, and what each forward pass does.
GENERATOR = ("self.rng = np.random.default_rng(0)", "x = x + float(self.rng.normal())")
COUNTER = ("self.calls = 0", "self.calls += 1")
TABLE = ("self.table = {}", "self.table[len(self.table)] = 1")


def found(fault: Fault, folder: Path) -> tuple[str, list[Finding]]:
    """Return the source of a faulty recipe, and what the probes alone find in it."""
    source = source_of(fault)
    (folder / "planted.py").write_text(source)
    # Of this process, only the planted module is the user's: tests of others have thousands of objects.
    mine = lambda: {name: each for name, each in user_modules().items() if str(folder) in str(each.__file__)}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samebits.replay.probe.user_modules", mine)
        return source, judge(probe(str(folder / "planted.py"), ["device=cpu"]), [])[0]


def model_with(*states: tuple[str, str]) -> Fault:
    starts, lines = zip(*states, strict=True)
    return Fault("several", (), {"MODEL": "\n        ".join(starts), "FORWARD": "\n        ".join(lines)})


def marked(source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if MARK in line)


def test_a_generator_is_named_before_a_counter_and_a_table(tmp_path: Path) -> None:
    source, (finding,) = found(model_with(COUNTER, (GENERATOR[0], f"{GENERATOR[1]}  {MARK}"), TABLE), tmp_path)
    assert (finding.kind, finding.line) == ("generator", marked(source))
    assert [each.split()[0] for each in finding.others] == ["model.calls", "model.table"]


def test_states_that_do_not_act_are_no_fault(tmp_path: Path) -> None:
    assert found(model_with((GENERATOR[0], "self.noise = self.rng.normal()"), COUNTER, TABLE), tmp_path)[1] == []


def test_a_cache_of_augmented_samples_is_found_though_no_trial_reads_a_sample_twice(tmp_path: Path) -> None:
    code = f"""if index in self.kept:
            return self.kept[index]
        point = point + torch.randn(8)
        self.kept[index] = point, label  {MARK}"""
    source, (finding,) = found(Fault("a cache", (), {"DATA": "self.kept = {}", "SAMPLE": code}), tmp_path)
    assert finding.what.startswith("training sample")
    assert finding.line == marked(source)


def test_what_the_loss_reads_is_not_taken_for_what_forward_reads(tmp_path: Path) -> None:
    code = {"FORWARD": "time.time()", "LOSS": f"value = value + time.time() % 1  {MARK}"}
    source, (finding,) = found(Fault("the clock in the loss", (), code), tmp_path)
    assert finding.what.startswith("the loss `cross_entropy` differs between two computations")
    assert finding.line == marked(source)


def outcome(name: str, **values: Any) -> Outcome:
    return Outcome(Trial(name, procs=int(name[0])), None, **values)


def judged(suspects: list[Suspect], *outcomes: Outcome) -> Finding:
    notes = {"again": [], "losses": {}, "suspects": [asdict(each) for each in suspects]}
    return judge(notes, [outcome("1 process"), *outcomes, outcome("1 process again")])[0][0]


def test_an_evaluation_that_only_worlds_of_several_processes_change_is_the_merge_of_the_metric() -> None:
    difference = TraceDifference(EVALUATION, None, None, "top1", "0.5 and 0.25")
    merge = Suspect(MERGE, "Mean.merge", "recipe.py", 7, EVALUATION)
    finding = judged([merge], outcome("2 processes", difference=difference))
    assert finding.what == "the evaluation's `top1` differs between 1 process and 2 processes: 0.5 and 0.25"
    assert (finding.kind, finding.line) == ("metric merge", 7)


def test_the_first_difference_of_all_trials_counts() -> None:
    later = TraceDifference(FORWARD, 2, 0, "conv")
    first = TraceDifference(SAMPLES, 1, 0, "12")
    trials = outcome("2 processes", difference=later), outcome("3 processes", difference=first)
    assert judged([], *trials).what == "training sample `12` differs between 1 process and 3 processes at step 2"


def test_ranks_that_differ_at_the_start_are_explained_by_what_reads_the_rank() -> None:
    error = SamebitsError("the ranks differ in a trial micro-batch", fix="Remove what depends on the rank.")
    finding = judged(
        [Suspect(RANK, "os.environ['RANK']", "recipe.py", 3, FORWARD)], outcome("2 processes", error=error)
    )
    assert finding.what == "2 processes: the ranks differ in a trial micro-batch"
    assert (finding.kind, finding.line) == ("rank", 3)


def test_an_error_of_one_world_is_reported_with_its_own_cause_and_line() -> None:
    error = SamebitsError("the recipe raised KeyError: 7", fix="Correct the recipe.")
    finding = judged([], outcome("2 processes", error=error, line=("recipe.py", 9)))
    assert (finding.kind, finding.line, finding.fix) == ("error", 9, "Correct the recipe.")
