"""Arguments of the Trainer that exact training refuses, and weights that it has to convert."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from samebits.errors import CheckpointError
from samebits.integrations.refusal import Refusal, accumulation, refuse

_STRATEGIES = ("random", "sequential")
_CONFIG = "config.json"


def check_arguments(args: Any) -> None:
    """Check TrainingArguments. Raises ConfigError if training with them can't be exact."""
    strategy = getattr(args, "train_sampling_strategy", "random")
    refuse(
        accumulation(args.gradient_accumulation_steps),
        Refusal(args.n_gpu > 1, f"one process uses {args.n_gpu} GPUs by DataParallel",
                "It splits each micro-batch by the number of GPUs.",
                f"Start one process for each GPU: torchrun --nproc-per-node {args.n_gpu}."),
        Refusal(args.auto_find_batch_size, "auto_find_batch_size is on",
                "The size of a micro-batch would depend on the memory of the machine.",
                "Leave it out, and set per_device_train_batch_size."),
        Refusal(not args.average_tokens_across_devices, "average_tokens_across_devices is off",
                "Each process would divide its loss by its own number of tokens.", "Leave it out."),
        Refusal(args.data_seed is not None and args.data_seed != args.seed,
                f"data_seed is {args.data_seed}, and seed is {args.seed}",
                "One seed decides the order and all random numbers.", "Leave out data_seed."),
        Refusal(args.ignore_data_skip, "ignore_data_skip is on",
                "A resumed run would train on the first samples of the epoch again.",
                "Leave it out: skipping reads no samples."),
        Refusal(strategy not in _STRATEGIES, f"train_sampling_strategy is {strategy}",
                "It groups samples by the batch size of all processes.", "Leave it out.", ", ".join(_STRATEGIES)),
        *(Refusal(getattr(args, name, None), f"{name} is on",
                  "It sums gradients in an order that depends on the number of processes.", f"Leave out {name}.")
          for name in ("fsdp", "deepspeed")),
    )  # fmt: skip


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
