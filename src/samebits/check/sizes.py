"""Sizes of a check: small micro-batches, so that a few steps take seconds on any recipe."""

from samebits.config.schema import RunConfig

MICRO_BATCH, EVAL_BATCH = 4, 4
# Micro-batches of a step, the first that fits: 2 and 3 processes get unequal shares of 5.
NUM_MICRO_BATCHES = (5, 4, 3, *range(6, 100))
NUM_EVAL = 6 * EVAL_BATCH  # validation samples
TIMEOUT_S = 120
# Come before the user's settings. A hang is found before the others' collectives time out, and named by its rank.
TIMEOUTS = (
    f"cluster.timeout_s={TIMEOUT_S}",
    f"cluster.join_timeout_s={TIMEOUT_S}",
    f"watch.hang_timeout_s={3 * TIMEOUT_S // 4}",
)


def small_sizes(config: RunConfig, num_samples: int) -> list[str]:
    """Return settings that make a recipe's steps small and keep everything else.

    No step has a single sample, which batch norm could not normalize.
    """
    micro = min(config.micro_batch, MICRO_BATCH)
    steps = [micro * count for count in NUM_MICRO_BATCHES]
    step = next((step for step in steps if num_samples % step != 1), steps[0])
    return [
        f"micro_batch={micro}",
        f"global_batch={step}",
        f"eval_batch={min(config.eval_batch, EVAL_BATCH)}",
        f"epochs={max(config.epochs, 6)}",
        "compile=false",
        "activation_checkpointing=false",
    ]
