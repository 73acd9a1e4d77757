"""Thirty incidents of a training, planted into the recipe of `edits.py`, and what the printed hints lead to."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.unit.replay.edits import RECIPE

_READ = "Batch(self.pictures[places] + 0.1 * brightness, self.labels[places], places)"
_LOSS = 'return {"cross_entropy": F.cross_entropy(outputs, batch.targets), "size": 1e-3 * outputs.square().mean()}'
_EXPLODES = """class Explodes(nn.Module):
    def forward(self, x):
        return x * 1e30 * 1e30 if self.training else x


class Net(nn.Module):"""


@dataclass(frozen=True)
class Incident:
    """An incident: its name, edits of the recipe, settings, how to look for it, and what is then printed.

    Attributes:
        look: Options of `samebits debug`; empty: the command that the error of the training names.
        expression: What to print of the step.
    """

    name: str
    edits: tuple[tuple[str, str], ...]
    found: str
    settings: tuple[str, ...] = ()
    look: tuple[str, ...] = ()
    expression: str = "loss"

    def recipe(self) -> str:
        """Return the recipe with the incident."""
        text = RECIPE
        for old, new in self.edits:
            assert old in text, (self.name, old)
            text = text.replace(old, new)
        return text


def _of_samples() -> Iterator[Incident]:
    for value in ("nan", "inf", "-inf"):
        for sample in (7, 20, 35):
            pictures = f"self.pictures.index_fill(0, torch.tensor([{sample}]), float('{value}'))[places]"
            yield Incident(
                f"sample {sample} is {value}",
                ((_READ, _READ.replace("self.pictures[places]", pictures)),),
                f"not finite sample {sample}, row",
            )
    for name, factor in (
        ("a division by zero", "/ (places != 33).float().view(-1, 1, 1, 1)"),
        ("the root of a negative number", "+ torch.where(places == 33, -1.0, 1.0).sqrt().view(-1, 1, 1, 1)"),
        ("a logarithm", "+ torch.where(places == 33, 0.0, 1.0).log().view(-1, 1, 1, 1)"),
    ):  # fmt: skip
        yield Incident(
            f"an augmentation with {name}",
            ((_READ, _READ.replace("0.1 * brightness", f"0.1 * brightness {factor}")),),
            "not finite sample 33, row",
        )


def _of_modules() -> Iterator[Incident]:
    for old, new, module in (
        ("nn.Conv2d(1, width, 3, padding=1)", "nn.Sequential(nn.Conv2d(1, width, 3, padding=1), Explodes())", "stem.1"),
        ("nn.BatchNorm2d(width)", "nn.Sequential(nn.BatchNorm2d(width), Explodes())", "norm.1"),
        ("nn.Dropout(0.2)", "nn.Sequential(nn.Dropout(0.2), Explodes())", "dropout.1"),
        ("nn.Linear(9 * width, 3)", "nn.Sequential(nn.Linear(9 * width, 3), Explodes())", "head.1"),
    ):
        yield Incident(
            f"{module} explodes",
            (("class Net(nn.Module):", _EXPLODES), (old, new)),
            f"not finite output of module {module} (Explodes), micro-batch 0",
        )
    yield Incident(
        "the model itself explodes",
        (("return self.head(self.dropout(x.flatten(1)))", "return 1e30 * 1e30 * self.head(x.flatten(1))"),),
        "not finite output of module the model (Net), micro-batch 0",
    )
    yield Incident(
        "a broken rank",  # from its ninth micro-batch on; on one process, the step is as it should be
        (
            ("import time", "import os"),
            ("class Net(nn.Module):", "CALLS = []\n\n\nclass Net(nn.Module):"),
            (
                "        x = F.relu(self.norm(self.stem(x)))",
                "        CALLS.append(x)\n"
                "        is_broken = os.environ.get('RANK') == '1' and len(CALLS) > 8\n"
                "        x = F.relu(self.norm(self.stem(x))) * (float('nan') if is_broken else 1.0)",
            ),
        ),
        "the record has no step",
        ("--procs", "2"),
        expression="loss < 10",
    )
    for rate in ("1e20", "1e30"):
        yield Incident(
            f"learning rate {rate}",
            (),
            "not finite output of module",
            (f"optim.lr={rate}", "optim.clip_norm=null"),
        )


def _of_losses() -> Iterator[Incident]:
    for term in ("outputs.mean() * 0).log()", "outputs.mean() * 0 - 1).sqrt()", "outputs.mean() * 0).reciprocal()"):
        yield Incident(
            f"a loss with ({term}",
            ((_LOSS, _LOSS.replace('"size": 1e-3 * outputs.square().mean()', f'"size": ({term}')),),
            "not finite the loss, although the model's outputs are finite",
        )
    for name, parameter in (("stem.weight", "self.stem.weight"), ("head.bias", "self.head.bias"),
                            ("blocks.0.weight", "self.blocks[0].weight")):  # fmt: skip
        # The root of 0 has an infinite slope, and its value is finite.
        yield Incident(
            f"the gradient of {name}",
            (("return self.head(", f"x = x + ({parameter} * 0).square().sum().sqrt()\n        return self.head("),),
            f"not finite gradient of {name}, although the loss is finite",
        )


def _without_an_error() -> Iterator[Incident]:
    for sample in (13, 71):
        yield Incident(
            f"the label of sample {sample} is wrong",
            ((_READ, _READ.replace("self.labels[places]", f"(self.labels[places] + (places == {sample})) % 3")),),
            "equal the record, bit for bit",
            look=("--sample", str(sample)),
            expression=f"'row', batch.names.index('{sample}')",
        )
    yield Incident(
        "a spike of the loss",
        ((_LOSS, _LOSS.replace("1e-3 *", "(10 if (batch.indices == 55).any() else 1e-3) *")),),
        "equal the record, bit for bit",
        look=("--when", "loss > 2"),
        expression="55 in batch.indices.tolist()",
    )
    yield Incident(
        "a gradient of twice the size",
        ((_LOSS, _LOSS.replace("return {", "k = 50 if (batch.indices == 55).any() else 1\n    return {").replace(
            "F.cross_entropy(outputs, batch.targets)", "F.cross_entropy(k * outputs, batch.targets)")),),
        "equal the record, bit for bit",
        look=("--when", "norm > 10"),
        expression="55 in batch.indices.tolist()",
    )  # fmt: skip


INCIDENTS = [*_of_samples(), *_of_modules(), *_of_losses(), *_without_an_error()]
