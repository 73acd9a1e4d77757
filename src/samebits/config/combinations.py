"""Settings that exclude each other, as one table."""

from typing import NamedTuple

from samebits.config.sections import Settings


class Exclusion(NamedTuple):
    """Settings that cannot be combined."""

    when: str  #: A condition: `name=value`, `name!=value`, or `name` for any value but null, false or an empty list.
    not_with: str  #: Another condition.
    do: str  #: How to resolve it.
    why: str = ""  #: The reason, as the end of the message.


_WHOLE_TENSORS = ", because it needs whole tensors"

# The first row that applies is reported.
EXCLUSIONS = (
    Exclusion("loss_scale!=dynamic", "precision!=fp16", "Set precision=fp16, or loss_scale=dynamic."),
    Exclusion("kernels=portable", "compile=true", "Set compile=false, or kernels=auto.",
              ", because compiled kernels join operations that each have to round"),
    Exclusion("kernels=portable", "precision=tf32", "Set precision=fp32, or kernels=auto."),
    Exclusion("kernels=portable", "mode!=exact", "Set mode=exact, or kernels=auto."),
    Exclusion("parallel=fsdp", "mode!=exact", "Set mode=exact, or parallel=ddp."),
    Exclusion("watch.recheck", "parallel=fsdp", "Set parallel=ddp."),
    Exclusion("record.content=true", "parallel=fsdp", "Set parallel=ddp."),
    Exclusion("parallel=fsdp", "batch_norm=sync", "Set batch_norm=micro."),
    Exclusion("activation_checkpointing", "batch_norm=sync", "Set batch_norm=micro.",
              ", because recomputation would run its all-reduce twice"),
    Exclusion("compress!=none", "parallel=fsdp", "Set compress=none, or parallel=ddp."),
    Exclusion("compile=true", "activation_checkpointing", "Set compile=false."),
    Exclusion("compile=true", "parallel=fsdp", "Set compile=false."),
    Exclusion("optim.name=lamb", "parallel=fsdp", "Set optim.name=adamw, or parallel=ddp.", _WHOLE_TENSORS),
    Exclusion("optim.name=muon", "parallel=fsdp", "Set optim.name=adamw, or parallel=ddp.", _WHOLE_TENSORS),
    Exclusion("optim.layer_decay", "parallel=fsdp", "Set optim.layer_decay=null, or parallel=ddp."),
    Exclusion("compile=true", "batch_norm=sync", "Set compile=false, or batch_norm=micro.",
              ", whose micro-batches wait for each other inside the model"),
    Exclusion("watch.recheck", "mode!=exact", "Set mode=exact, or watch.recheck=null.",
              ", in which ranks may compute other bits"),
    Exclusion("watch.recheck", "batch_norm=sync", "Set batch_norm=micro, or watch.recheck=null.",
              ", in which no micro-batch can be computed without the others"),
    Exclusion("cluster.load_balancing=true", "mode!=exact", "Set cluster.load_balancing=false."),
    Exclusion("cluster.load_balancing=true", "parallel=fsdp", "Set cluster.load_balancing=false."),
    Exclusion("cluster.load_balancing=true", "batch_norm=sync", "Set cluster.load_balancing=false."),
    Exclusion("cluster.load_balancing=true", "watch.recheck", "Set cluster.load_balancing=false."),
    Exclusion("cluster.load_balancing=true", "record.content=true", "Set cluster.load_balancing=false."),
)  # fmt: skip


def find_exclusion(config: Settings) -> str | None:
    """Return the message of the first exclusion that applies to the settings, with its fix; None if none does."""
    for row in EXCLUSIONS:
        first, second = first_met(config, row.when), first_met(config, row.not_with)
        if first and second:
            return f"{first} cannot be combined with {second}{row.why}; fix: {row.do}"
    return None


def first_met(config: Settings, *conditions: str) -> str:
    """Return the first condition, as in `Exclusion`, that is met, with the value: `mode=fast`; or ""."""
    for condition in conditions:
        name, equals, wanted = condition.partition("=")
        is_negated = name.endswith("!")
        name = name.removesuffix("!")
        value: object = config
        for key in name.split("."):
            value = getattr(value, key)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not equals and value not in (None, False, ()):
            return name
        if equals and (text == wanted) != is_negated:
            return f"{name}={text}"
    return ""
