"""Results of all processes, each sample's once."""

from typing import Any

import torch
from accelerate.utils import gather, recursively_apply
from torch import Tensor

from samebits.cluster import collectives
from samebits.integrations.accelerate_loaders import EvaluationLoader, TrainingLoader


def gather_counted(accelerator: Any, data: Any, loader: TrainingLoader | EvaluationLoader, *, as_objects: bool) -> Any:
    """Gather the current batch's results in the order of the ranks.

    Args:
        data: Tensors of shape (N, ...) with a row for each sample, or (); nested or not. Or a list of plain values.
    """
    is_repeated = loader.num_counted == 0
    has_only_tensors = True
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        has_only_tensors = False
    if as_objects or not has_only_tensors:
        # Not by Accelerate's gather_object, which pickles.
        parts = collectives.all_gather_object(accelerator.exact_part.world, [] if is_repeated else list(data))
        return [item for part in parts for item in part]

    def counted(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if is_repeated:
            rows = rows[:0]
        elif loader.num_counted is not None and len(rows) == loader.batch_size:
            rows = rows[: loader.num_counted]  # the Trainer repeats a mean loss batch_size times
        if accelerator.num_processes == 1:
            return rows
        # `gather` needs tensors of equal size on all ranks, which have different numbers of rows.
        lengths = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        longest = max(lengths)
        if len(rows) < longest:
            rows = torch.cat([rows, rows.new_zeros((longest - len(rows), *rows.shape[1:]))])
        parts = gather(rows.contiguous()).split(longest) if longest else [rows]
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=False)])

    return recursively_apply(counted, data)
