"""The parts of a recipe: its interface to the engine. A recipe does not know ranks, steps or files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from samebits.data.samples import Batch, Samples, SampleSource
from samebits.errors import ConfigError
from samebits.metrics.eval_sets import check_set_names
from samebits.metrics.metric import Metric

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One training job, as a recipe describes it.

    Attributes:
        model: The network, on the CPU; called as `model(batch.inputs)`. The engine seeds torch's generator before it
            calls the recipe. Modules keep their mode: a batch norm in evaluation mode stays frozen in training.
        loss: (outputs, batch) -> named terms, each a mean over the samples of the batch (a 0-d tensor). Training
            minimizes their sum.
        train_data: Opens the training samples. A function, because predict needs no dataset.
        eval_data: Opens the validation samples.
        eval_sets: Opens further validation sets, by name. Their metrics are named after them: "night.top1".
        metric: Makes an empty metric. `monitor` names one of the keys of its `result()`.
        monitor: The metric that chooses the best checkpoint, and whether its "max" or "min" is best.
        init_weights: Initializes the model further, such as with pretrained weights (`load_pretrained`), and returns
            rows for the header of the run. Called once, on rank 0, when a run starts: not on resume, in eval or in
            predict. The other ranks receive the weights from rank 0.
        infer: Called by evaluation and prediction instead of the model: (model, batch.inputs) -> outputs, for test-time
            flips, several scales, a beam search. The evaluation then reports no loss.
        preprocess: Reads one file for `predict`: path -> the model's input for one sample, without the batch
            dimension; a tensor, or a dict, list or tuple of tensors and plain values.
        postprocess: Turns the outputs for one sample, `outputs[i]`, into a prediction that can be written as JSON.
        draw: Draws images of a validation: (the merged metric, the validation samples, the folder for them).
        draw_samples: Draws the first training samples, as the dataset returned them, into one PNG: (batches, path).
            Called in a thread during training: it must not change them or use random numbers.
        draw_prediction: Draws the prediction for one file: (path, the result of `postprocess`) -> an image.
        input_shape: Shape of the model's input for one sample, without the batch dimension, such as (3, 224, 224).
            None: the shape of the first validation sample (`export`) or training sample (`plan`).
        metadata: What users of an exported model need: classes, alphabet, skeleton, preprocessing, as plain JSON.
            `export` writes it into the file.
        describe: Rows for the header of the run: `{"data": "UCI digits", "model": "cnn"}`.
    """

    model: nn.Module
    loss: Callable[[Any, Batch], Mapping[str, Tensor]]
    train_data: Callable[[], SampleSource]
    eval_data: Callable[[], SampleSource]
    metric: Callable[[], Metric]
    monitor: tuple[str, str] = ("top1", "max")
    eval_sets: Mapping[str, Callable[[], SampleSource]] = field(default_factory=dict)
    init_weights: Callable[[nn.Module], Mapping[str, str]] | None = None
    infer: Callable[[nn.Module, Any], Any] | None = None
    preprocess: Callable[[Path], Any] | None = None
    postprocess: Callable[[Any], Mapping[str, Any]] | None = None
    draw: Callable[[Any, Samples, Path], None] | None = None
    draw_samples: Callable[[Sequence[Batch], Path], None] | None = None
    draw_prediction: Callable[[Path, Mapping[str, Any]], Image] | None = None
    input_shape: tuple[int, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    describe: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values that can be checked before any data is read.

        Raises:
            ConfigError: `monitor` has another form or no valid mode, or a validation set no valid name.
        """
        check_set_names(self.eval_sets, "Parts.eval_sets")
        fix = 'Set monitor=(NAME, "max") or (NAME, "min").'
        # A string of two characters would pass a test of its length alone.
        is_pair = isinstance(self.monitor, (tuple, list)) and len(self.monitor) == 2
        if not is_pair or not isinstance(self.monitor[0], str):
            raise ConfigError(
                f"monitor is {self.monitor!r}, not a name and a mode",
                where="Parts.monitor",
                fix=fix,
            )
        if self.monitor[1] not in ("max", "min"):
            raise ConfigError(
                f"the mode of the monitored metric is {self.monitor[1]!r}",
                where="Parts.monitor",
                allowed="max, min",
                fix=fix,
            )
