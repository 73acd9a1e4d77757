"""What a script decides by the numbers of its training loop, from its text."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from samebits.frames import callers
from samebits.own_loop.patched.decisions import decision


def found(tmp_path: Path, text: str) -> tuple[str, str]:
    """Run a script whose training loop calls look(), and return what it found first, with the text of its line."""
    seen: list[tuple[str, str]] = []

    def look(*_: Any) -> float:
        seen.append(decision(callers(sys._getframe(1))))
        return 1.0

    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    exec(compile(path.read_text(), str(path), "exec"), {"look": look, "loader": [(1, 2)] * 2})
    name, line = seen[0]
    return name, path.read_text().splitlines()[int(line.rpartition(":")[2]) - 1].strip() if line else ""


BY_TRAINING = {
    "a sum": """
        for epoch in range(3):
            total = 0.0
            for x, y in loader:
                loss = look(x, y)
                total += loss
            if total / 2 < 0.1:
                break
    """,
    "a loop with a flag": """
        is_running, epoch = True, 0
        while is_running:
            losses = []
            for x, y in loader:
                losses.append(look(x, y))
            epoch += 1
            if sum(losses) < 9:
                is_running = False
    """,
    "an object, behind a function": """
        class Stopper:
            stop = False
            def __call__(self, value):
                self.stop = value < 9
        def train():
            meter = []
            for number, (x, y) in enumerate(loader):
                meter.append(look(x, y))
            return sum(meter)
        stopper = Stopper()
        for epoch in range(3):
            train_loss = train()
            stopper(train_loss)
            if stopper.stop:
                break
    """,
    "attributes of a trainer": """
        class Trainer:
            best, bad = 9, 0
            def epoch(self):
                self.loss = 0
                for x, y in loader:
                    self.loss += look(x, y)
            def fit(self):
                for _ in range(3):
                    self.epoch()
                    if self.loss < self.best:
                        self.best, self.bad = self.loss, 0
                    else:
                        self.bad += 1
                    if self.bad > 1:
                        break
        Trainer().fit()
    """,
    "a rate": """
        group = {"lr": 0.1}
        for epoch in range(3):
            total = 0.0
            for x, y in loader:
                total += look(x, y)
            group["lr"] = 0.1 * total
    """,
    "a rate by a condition": """
        group, before = {"lr": 0.1}, 9.0
        for epoch in range(3):
            total = 0.0
            for x, y in loader:
                total += look(x, y)
            if total > before:
                group["lr"] *= 0.5
            before = total
    """,
}


@pytest.mark.parametrize("name", BY_TRAINING)
def test_a_decision_by_a_number_of_the_training_loop_is_found(tmp_path: Path, name: str) -> None:
    number, line = found(tmp_path, BY_TRAINING[name])
    assert number
    assert number.rpartition(".")[2] in line


BY_OTHERS = {
    "an evaluation in the same function": """
        for epoch in range(3):
            losses, others = [], []
            for x, y in loader:
                losses.append(look(x, y))
            for x, y in [(1, 2)]:
                others.append(x + y)
            if sum(others) > 2:
                break
            print(sum(losses))
    """,
    "an evaluation beside the loss": """
        def train():
            total = 0.0
            for x, y in loader:
                total += look(x, y)
            return total
        history = {"train": [], "val": []}
        for epoch in range(3):
            train_loss = train()
            val_loss = 1.0
            history["train"].append(train_loss)
            history["val"].append(val_loss)
            saved = {"loss": train_loss, "best": val_loss}
            if history["val"][-1] > 0 or saved["best"] > 0:
                break
    """,
    "phases": """
        bad = 0
        for epoch in range(3):
            for phase in ("train", "val"):
                total = 0.0
                for x, y in loader:
                    total += look(x, y)
                if phase == "val" and total > 1:
                    bad += 1
            if bad > 1:
                break
    """,
    "a loss with lr in its name, and a rate of the epoch": """
        for epoch in range(3):
            lr = 0.1 * 0.5**epoch
            for x, y in loader:
                lr_loss = look(x, y)
            lr_loss = lr_loss * 2
            if epoch > 0:
                break
    """,
    "a file that is kept": """
        best, saved = 9.0, 0
        for epoch in range(3):
            total = 0.0
            for x, y in loader:
                total += look(x, y)
            if total < best:
                best, saved = total, epoch
    """,
}


@pytest.mark.parametrize("name", BY_OTHERS)
def test_a_decision_by_something_else_is_none(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, BY_OTHERS[name]) == ("", "")
