"""What a Trainer that resumes reads from a checkpoint besides the Trainer's own files."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from samebits.errors import CheckpointError
from samebits.integrations.accelerate_settings import read_position

_CONFIG = "config.json"


def check_position(checkpoint: Path, here: dict[str, Any]) -> None:
    """Check that a checkpoint has this run's position, except for the step."""
    there = read_position(checkpoint)
    differing = [name for name in here if name != "step" and there.get(name) != here[name]]
    if differing:
        raise CheckpointError(
            "the checkpoint is of another run",
            given="\n".join(f"{name}: {there.get(name)} there, {here[name]} here" for name in differing),
            where=checkpoint,
            fix="Use its global_batch, per_device_train_batch_size, seed and data, or train without resuming.",
        )


def load_converted(model: nn.Module, checkpoint: Path) -> bool:
    """Load the weights of a model of transformers, and return whether it is one, and was loaded.

    `save_pretrained` writes some models under the names of their first release. The Trainer of transformers 5.23 does
    not convert them back, and leaves out what it does not find.

    Raises:
        CheckpointError: The checkpoint lacks weights of the model.
    """
    if not isinstance(model, PreTrainedModel) or not (checkpoint / _CONFIG).is_file():
        return False
    loaded, info = type(model).from_pretrained(
        checkpoint, config=model.config, output_loading_info=True, local_files_only=True
    )
    if info["missing_keys"]:
        raise CheckpointError(
            f"the checkpoint lacks {len(info['missing_keys'])} tensors of the model",
            given=", ".join(sorted(info["missing_keys"]))[:300],
            where=checkpoint,
            fix="Resume with the model that was trained.",
        )
    model.load_state_dict(loaded.state_dict())
    return True
