"""The forward pass of a micro-batch through model and loss, with checks of the recipe's loss."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.data.collation import describe
from samebits.data.micro_batches import two_or_more
from samebits.data.samples import Batch
from samebits.engine.job import MAX_TERMS, Job
from samebits.errors import ConfigError

_SHOWN = 8  # samples, in an error


def forward(job: Job, batch: Batch) -> tuple[list[str], Tensor, Tensor]:
    """Run the forward pass of a micro-batch, whose tensors, on the device, have any shape `(N, ...)`.

    Returns:
        The names of the loss's terms, their sum (0-d), and their detached values (MAX_TERMS,), padded with zeros.

    Raises:
        ConfigError: The recipe's loss returns a wrong type, or has no gradient.
    """
    try:
        outputs = (job.compiled or job.model)(batch.inputs)
    except ValueError as error:
        # torch raises a plain ValueError for it, so only the text distinguishes it from errors of the recipe.
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "batch norm can't normalize a micro-batch of one sample whose feature maps have one pixel",
            given=f"global_batch={job.config.global_batch}, micro_batch={job.config.micro_batch}: "
            f"an epoch of {job.order.num_samples:,} samples has such a micro-batch",
            fix=two_or_more(job.order.num_samples, job.config.global_batch, job.config.micro_batch),
        ) from None
    try:
        terms = job.parts.loss(outputs, batch)
    except Exception as error:
        error.add_note(_describe_micro_batch(outputs, batch))
        raise
    check_terms(terms)
    values = torch.stack([term.float() for term in terms.values()])
    # Padded, since the extras are part of messages whose size was fixed before the first loss was known.
    return list(terms), values.sum(), F.pad(values.detach(), (0, MAX_TERMS - len(values)))


def _describe_micro_batch(outputs: object, batch: Batch) -> str:
    """Describe what a loss has failed on: "samples 3 5 7 …; outputs: a tensor (8, 3) float32; targets: ... 0 to 7"."""
    samples, targets = batch.indices.tolist(), batch.targets
    text = f"raised by the recipe's loss for samples {' '.join(map(str, samples[:_SHOWN]))}"
    text += f"{' …' * (len(samples) > _SHOWN)}; outputs: {describe(outputs)}; targets: {describe(targets)}"
    if isinstance(targets, Tensor) and targets.numel() and targets.device.type == "cpu" and not targets.is_complex():
        text += f", {targets.min().item():g} to {targets.max().item():g}"
    return text


def check_terms(terms: object) -> None:
    """Check what a recipe's loss returned."""
    if not isinstance(terms, Mapping):
        raise ConfigError(
            f"the recipe's loss returned a {type(terms).__name__}, not a dict of named terms",
            fix='Return {"loss": ...}.',
        )
    if not 0 < len(terms) <= MAX_TERMS:
        raise ConfigError(
            f"the recipe's loss returned {len(terms)} terms",
            allowed=f"1 to {MAX_TERMS}",
            fix="Add some of them up, or return at least one.",
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise ConfigError(
                f"the recipe's loss returned {name} as a {type(term).__name__}, not a tensor",
                fix="Return a tensor that torch computed.",
            )
        if term.dim() != 0:
            raise ConfigError(
                f"the recipe's loss returned {name} of shape {tuple(term.shape)}, not one number",
                fix="Return the mean over the batch's samples.",
            )
        if not term.is_floating_point():
            raise ConfigError(
                f"the recipe's loss returned {name} as {term.dtype}, which has no gradient",
                fix="Compute it in floating point, without .long() or counts.",
            )
    if torch.is_grad_enabled() and not any(term.requires_grad for term in terms.values()):
        raise ConfigError(
            "the recipe's loss has no gradient, so nothing would be trained",
            given=f"terms: {', '.join(map(str, terms))}",
            cause="The outputs were detached, or passed through argmax, NumPy or torch.no_grad() in forward or loss.",
            fix="Compute the loss from the model's outputs with differentiable torch functions.",
        )
