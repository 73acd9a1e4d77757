"""What a recipe hands over to the engine. A recipe knows nothing of ranks, steps or files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.data.samples import Batch, Samples
from lockstep.errors import ConfigError
from lockstep.metrics.metric import Metric

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One training job, as a recipe describes it.

    Attributes:
        model: The network; called as `model(batch.inputs)`. Built on CPU; parameters drawn from torch's generator,
            which the engine seeds before it calls the recipe. Modules stay in the mode they are in: one in evaluation
            mode, such as a frozen batch norm, is trained in it.
        loss: (outputs, batch) -> named terms, each a mean over the samples of the batch (a 0-d tensor). Their sum is
            what is minimised.
        train_data: Opens the training samples. A function, so that predict needs no data set.
        eval_data: Opens the held-out samples.
        metric: Makes an empty metric; its `result()` names what a run is judged by.
        best: Name of the metric by which the best checkpoint is chosen, and whether "max" or "min" is better.
        start: Brings the fresh model to where training starts, such as pretrained weights (`load_pretrained`), and
            gives rows for the head of the run. Called once, on rank 0, when a run begins: not on resume, nor in eval
            and predict. The other ranks get the weights from there.
        infer: What evaluation and prediction call in place of the model: (model, batch.inputs) -> outputs, for a flip
            test, several scales, a beam search. The evaluation then has no loss.
        read_input: Reads one file that a person gives to `predict`: path -> the model's input for one sample,
            without the batch dimension; a tensor, or a dict, list or tuple of tensors and plain values.
        answer: What the model says of one input: `outputs[i]`, its outputs for one sample -> facts that can be written
            as JSON.
        draw: Draws pictures of an evaluation: (the merged metric, the held-out samples, the folder for them).
        draw_samples: Draws the first training samples, as the data set gave them, into one PNG: (batches, path). Called
            in a thread beside training: it must neither change them nor use random numbers.
        draw_answer: Draws what was found in a file of a person's: (path, the answer's facts) -> a picture.
        input_shape: Shape of the model's input for one sample, without the batch dimension; None: that of the first
            held-out one for `export`, of the first training one for `plan`.
        meaning: What others have to know of the model's inputs and outputs: classes, alphabet, skeleton, mean and
            standard deviation; plain JSON. Exported files have it with them.
        describe: Lines for the head of a run: `{"data": "UCI digits (scikit-learn)", "model": "cnn"}`.
    """

    model: nn.Module
    loss: Callable[[Any, Batch], Mapping[str, Tensor]]
    train_data: Callable[[], Samples]
    eval_data: Callable[[], Samples]
    metric: Callable[[], Metric]
    best: tuple[str, str] = ("top1", "max")
    start: Callable[[nn.Module], Mapping[str, str]] | None = None
    infer: Callable[[nn.Module, Any], Any] | None = None
    read_input: Callable[[Path], Any] | None = None
    answer: Callable[[Any], Mapping[str, Any]] | None = None
    draw: Callable[[Any, Samples, Path], None] | None = None
    draw_samples: Callable[[Sequence[Batch], Path], None] | None = None
    draw_answer: Callable[[Path, Mapping[str, Any]], Image] | None = None
    input_shape: tuple[int, ...] | None = None
    meaning: Mapping[str, Any] = field(default_factory=dict)
    describe: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigError: `best` names no direction.
        """
        if self.best[1] not in ("max", "min"):
            raise ConfigError(f"best of a metric can't be {self.best[1]!r}", where="Parts.best", allowed="max, min")
