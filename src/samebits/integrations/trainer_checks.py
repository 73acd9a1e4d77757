"""Arguments of the Trainer that exact training refuses."""

from __future__ import annotations

from typing import Any

from samebits.errors import ConfigError

_STRATEGIES = ("random", "sequential")


def check_arguments(args: Any) -> None:
    """Check TrainingArguments.

    Raises:
        ConfigError: Training with them can't be exact.
    """
    if args.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}",
            cause="global_batch counts all samples of a step, so accumulation follows from it.",
            fix="Leave out gradient_accumulation_steps.",
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process uses {args.n_gpu} GPUs by DataParallel",
            cause="It splits each micro-batch by the number of GPUs.",
            fix=f"Start one process for each GPU: torchrun --nproc-per-node {args.n_gpu}.",
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size is on",
            cause="The size of a micro-batch would depend on the memory of the machine.",
            fix="Leave it out, and set per_device_train_batch_size.",
        )
    if not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices is off",
            cause="Each process would divide its loss by its own number of tokens.",
            fix="Leave it out.",
        )
    if args.data_seed is not None and args.data_seed != args.seed:
        raise ConfigError(
            f"data_seed is {args.data_seed}, and seed is {args.seed}",
            cause="One seed decides the order and all random numbers.",
            fix="Leave out data_seed.",
        )
    if args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip is on",
            cause="A resumed run would train on the first samples of the epoch again.",
            fix="Leave it out: skipping reads no samples.",
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"train_sampling_strategy is {strategy}",
            allowed=", ".join(_STRATEGIES),
            cause="It groups samples by the batch size of all processes.",
            fix="Leave it out.",
        )
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name} is on",
                cause="It sums gradients in an order that depends on the number of processes.",
                fix=f"Leave out {name}.",
            )
