"""What a loop can do wrong in a step, found before the weights change and named."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from samebits.data.order import Step
from samebits.errors import TrainError
from samebits.own_loop.trained import Trained


def check_finite(trained: Sequence[Trained], step: Step) -> None:
    """Check the sums of a step's gradients.

    Raises:
        TrainError: One is not finite; the same error on all ranks.
    """
    norms = [norm for each in trained for norm in each.norms()]
    # One transfer for the norms of all optimizers.
    if not norms or all(map(math.isfinite, torch.stack(norms).tolist())):
        return
    raise TrainError(
        "the gradient is not finite",
        given=f"step {step.number:,}, epoch {step.epoch}, both counted from 0",
        where="weights are those before this step, on all ranks",
        cause="The loss of a micro-batch is not finite, or its gradient overflowed.",
        fix=f"Lower the learning rate, clip gradients, or check the inputs and losses of step {step.number:,} for NaN. "
        "With a GradScaler, give it to exact(per_step=[scaler]).",
    )


def check_settings(
    trained: Sequence[Trained],
    step: Step,
    *,
    is_last: bool = False,
    is_first_step: bool = False,
    counts_steps: bool = False,
) -> None:
    """Check at the end of a micro-batch that the loop has set what it set in the step's first one, for each optimizer.

    In the last one it stays, as what a usual loop sets once a step. Before that, it is undone.

    Args:
        is_first_step: Whether it is the first one of an iteration: what follows from its number may not be set yet.
        counts_steps: Whether the script counts steps: it may set another value in the last one, for the next step, or
            in the last one only.
    """
    for each in trained:
        # torch's mark of a scheduler on the optimizer that it was made for: it moves on even if its change is undone.
        is_scheduled = each.is_followed or hasattr(each.optimizer.step, "_wrapped_by_lr_sched")
        first = each.settings if is_scheduled else each.set_first
        seen = each.read_settings() if is_scheduled else [*each.set_at_step, *each.read_settings()]
        each.set_first = each.set_first or seen
        if is_last and counts_steps:
            first = first[: len(each.set_at_step)]
            first = [] if first == each.settings else first
        elif not (is_last or is_first_step or is_scheduled) and each.set_at_step == each.settings:
            first = [
                *each.settings,
                *each.settings,
            ]  # what is set for the next step is set in the last one
        for before, now in zip(first if not (is_last and is_scheduled) else (), seen, strict=False):
            names = [name for name in now if before.get(name) != now[name]]
            if names:
                raise TrainError(
                    f"{names[0]} of the optimizer changed within a step: {before.get(names[0])} -> {now[names[0]]}",
                    given=f"step {step.number:,}, {len(step.micro_batches)} micro-batches on this rank",
                    cause="A scheduler is stepped after each micro-batch, so its schedule depends on their number."
                    if is_scheduled
                    else "The script sets it in each micro-batch, from a number that depends on the processes.",
                    fix="Make the scheduler after exact(), from len(loader), and give it to "
                    "loader.per_step(scheduler); or step it after each epoch."
                    if is_scheduled
                    else f"Set it from loader.step, equal in all passes of a step: {names[0]} = f(loader.step).",
                )
        for group, before in zip(
            each.optimizer.param_groups, [] if is_last else each.settings, strict=False
        ):
            group.update(before)


def refuse_second_step(trained: Trained) -> None:
    """Refuse a second `optimizer.step()` in a micro-batch, which would be left out.

    Raises:
        TrainError: Always.
    """
    raise TrainError(
        "the loop called optimizer.step() twice in one micro-batch",
        given=type(trained.optimizer).__name__,
        cause="An optimizer acts once a step, on the sum over its micro-batches, so the second update would be lost.",
        fix="Add the losses, and call backward() and optimizer.step() once.",
    )


def check_strays(trained: Trained, step: Step) -> None:
    """Check that an optimizer acts only on gradients that were summed over the ranks."""
    every = trained.all_parameters()
    if len(every) == len(trained.parameters):
        return
    known = set(trained.parameters)
    strays = [each for each in every if each.grad is not None and each not in known]
    if strays:
        raise TrainError(
            f"a parameter of shape {tuple(strays[0].shape)} was unfrozen within a step",
            given=f"step {step.number:,}",
            cause="Its gradient has no part in the sum over the ranks, which is laid out when a step begins.",
            fix="Set requires_grad before the loop, or after optimizer.step() if loader.sync_gradients.",
        )


def check_whole(trained: Trained, named: Collection[Tensor | nn.Parameter]) -> None:
    """Check that a loop drops the gradients of all parameters of an optimizer, by those `named`, of any shape."""
    if not set(trained.parameters) <= set(named):
        raise TrainError(
            "the loop drops gradients of a part of an optimizer's parameters, between backward() and step()",
            given="zero_grad() of a module",
            fix="Call optimizer.zero_grad(), or detach() what shall have no gradient.",
        )
