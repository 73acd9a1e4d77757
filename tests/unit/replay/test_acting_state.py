"""Where a recipe keeps several things that change, the one that acts on the result is named."""

from pathlib import Path

import pytest

from samebits.replay.judge import Finding, judge
from samebits.replay.probe import probe
from samebits.replay.state import user_modules
from tests.check_faults import MARK, Fault, source_of

# Name -> (set up, acting, inert), with the value that changes as `{x}`. Each is a state that is there in both forms.
KINDS = {
    "generator": (
        "self.rng = np.random.default_rng(0)",
        f"{{x}} = {{x}} + self.rng.normal()  {MARK}",
        "self.noise = self.rng.normal()",
    ),
    "torch generator": (
        "self.torch_rng = torch.Generator().manual_seed(0)",
        f"{{x}} = {{x}} + torch.rand(1, generator=self.torch_rng)  {MARK}",
        "torch.rand(1, generator=self.torch_rng)",
    ),
    "counter": (
        "self.calls = 0",
        f"self.calls += 1  {MARK}\n        {{x}} = {{x}} * (1 + self.calls / 10)",
        "self.calls += 1",
    ),
    "history": (
        "self.seen = []",
        f"self.seen.append(0)  {MARK}\n        {{x}} = {{x}} * (1 + len(self.seen) / 10)",
        "self.seen.append(0)",
    ),
    "table": (
        "self.table = {}",
        f"self.table[len(self.table)] = 1  {MARK}\n        {{x}} = {{x}} + len(self.table) / 10",
        "self.table[len(self.table)] = 1",
    ),
    "count": ("self.ids = itertools.count()", f"{{x}} = {{x}} + next(self.ids) / 10  {MARK}", "next(self.ids)"),
    "array": (
        "self.sums = np.zeros(3)",
        f"self.sums[0] += 1  {MARK}\n        {{x}} = {{x}} + float(self.sums[0]) / 10",
        "self.sums[0] += 1",
    ),
    "average": (
        "self.mean = torch.zeros(1)",
        f"self.mean = 0.9 * self.mean + 0.1  {MARK}\n        {{x}} = {{x}} + self.mean",
        "self.mean = 0.9 * self.mean + 0.1",
    ),
    "class attribute": (
        "type(self).total = 0",
        f"type(self).total += 1  {MARK}\n        {{x}} = {{x}} + self.total / 10",
        "type(self).total += 1",
    ),
    "last": (
        "self.latest = 0.0",
        f"before, self.latest = self.latest, 1.0  {MARK}\n        {{x}} = {{x}} + before",
        "self.latest += 1.0",
    ),
}
NAMES = list(KINDS)
QUICK = [("generator", "model"), ("count", "dataset")]


def planted(acting: str, place: str) -> str:
    number = NAMES.index(acting)
    inert = [NAMES[(number + 1) % len(NAMES)], NAMES[(number + 4) % len(NAMES)]]
    set_up, code, value = ("MODEL", "FORWARD", "x") if place == "model" else ("DATA", "SAMPLE", "point")
    lines = [KINDS[inert[0]][2], KINDS[acting][1].replace("{x}", value), KINDS[inert[1]][2]]
    starts = [KINDS[name][0] for name in (acting, *inert)]
    # The last inert state comes first, so that neither the order of the lines nor that of the attributes tells.
    source = {set_up: "\n        ".join(reversed(starts)), code: "\n        ".join(lines)}
    return source_of(Fault(acting, (), source))


def marked(source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if MARK in line)


def found(source: str, folder: Path) -> list[Finding]:
    (folder / "planted.py").write_text(source)
    # Of this process, only the planted module is the user's: tests of others have thousands of objects.
    mine = lambda: {name: each for name, each in user_modules().items() if str(folder) in str(each.__file__)}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samebits.replay.context.user_modules", mine)
        return _found(folder)


def _found(folder: Path) -> list[Finding]:
    return judge(probe(str(folder / "planted.py"), ["device=cpu"]), [])[0]


def _marks(name: str, place: str) -> list[pytest.MarkDecorator]:
    if (name, place) in QUICK:
        return []
    # `make test-full` has each kind in one place, `make test-cluster` the other places.
    is_here = place == ("model", "dataset")[NAMES.index(name) % 2]
    return [pytest.mark.full if is_here else pytest.mark.lab]


pytestmark = pytest.mark.usefixtures("torch_as_before")


@pytest.mark.parametrize(
    ("acting", "place"),
    [pytest.param(name, place, marks=_marks(name, place)) for name in NAMES for place in ("model", "dataset")],
)
def test_the_acting_one_of_three_suspicious_states_is_named(acting: str, place: str, tmp_path: Path) -> None:
    source = planted(acting, place)
    (finding,) = found(source, tmp_path)
    assert finding.line == marked(source)
    assert finding.others == []


def model_with(names: list[str], lines: list[str]) -> str:
    code = {"MODEL": [KINDS[name][0] for name in names], "FORWARD": lines}
    return source_of(Fault("several", (), {slot: "\n        ".join(each) for slot, each in code.items()}))


def test_the_clock_is_named_beside_states_that_do_not_act(tmp_path: Path) -> None:
    clock = f"x = x + time.perf_counter() % 1  {MARK}"
    source = model_with(["counter", "generator"], [KINDS["counter"][2], clock, KINDS["generator"][2]])
    (finding,) = found(source, tmp_path)
    assert (finding.kind, finding.line) == ("clock", marked(source))


def test_states_that_do_not_act_are_no_fault(tmp_path: Path) -> None:
    names = ["generator", "counter", "table"]
    assert found(model_with(names, [KINDS[name][2] for name in names]), tmp_path) == []


def test_a_state_that_acts_in_each_fourth_pass_only_is_named(tmp_path: Path) -> None:
    acting = [f"self.calls += 1  {MARK}", "x = x * (2 if self.calls % 4 == 0 else 1)"]
    source = model_with(["counter", "generator"], [KINDS["generator"][2], *acting])
    (finding,) = found(source, tmp_path)
    assert finding.line == marked(source)
