"""What a loop can do wrong in a step, found before the weights change and named."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from samebits.data.order import Step
from samebits.errors import TrainError
from samebits.own_loop.trained import Trained


def check_calls(trained: Sequence[Trained], step: Step, *, counts_steps: bool) -> None:
    """Check in the last micro-batch of a step that `step()` of an optimizer was called in all of them, or in none.

    Args:
        trained: The optimizers.
        step: The step.
        counts_steps: Whether the script looks at `loader.sync_gradients` or `loader.step`. It may then call it in the
            last one only.

    Raises:
        TrainError: It was called in some.
    """
    num = len(step.micro_batches)
    for each in trained:
        if 0 < each.num_calls < num and not (counts_steps and each.is_closed and each.num_calls == 1):
            where = "" if each.is_closed else ", but not in its last micro-batch"
            raise TrainError(
                f"the loop called optimizer.step() in some micro-batches of a step only{where}",
                given=f"step {step.number:,}: {each.num_calls} calls in {num} micro-batches",
                cause="The loop accumulates gradients by a counter of its own, or skips micro-batches.",
                fix="Call optimizer.step() in every pass; global_batch already accumulates. "
                "For several steps use loader.step.",
            )


def check_followers(bodies: Mapping[tuple[str, str], set[int]], step: Step, *, counts_steps: bool) -> None:
    """Check at the end of a step that what follows the optimizer was called in all micro-batches, or in none.

    Args:
        bodies: Object and method -> indices of this rank's micro-batches in which it was called.
        step: The step.
        counts_steps: As for `check_calls`.

    Raises:
        TrainError: It was called in some.
    """
    num = len(step.micro_batches)
    for (kind, name), called in bodies.items():
        if len(called) < num and not (counts_steps and called == {num - 1}):
            raise TrainError(
                f"the loop called {name}() of {kind} in some micro-batches of a step only",
                given=f"step {step.number:,}: {len(called)} of {num} micro-batches",
                cause="The loop counts passes itself, whose number depends on the processes.",
                fix=f"Call it in every pass; it acts once a step. For every second step: "
                f"if loader.sync_gradients and loader.step % 2 == 0: ... {name}()",
            )


def check_regular(stepping: Collection[bool], step: Step, *, counts_steps: bool) -> None:
    """Check that a loop that does not look at steps applies the gradients of all of them.

    Args:
        stepping: Whether `step()` was called, in the steps so far.
        step: The last one.
        counts_steps: As for `check_calls`.

    Raises:
        TrainError: It was called in some steps only.
    """
    if len(set(stepping)) > 1 and not counts_steps:
        raise TrainError(
            "the loop called optimizer.step() in some steps and not in others",
            given=f"step {step.number:,}, each with {len(step.micro_batches)} micro-batches on this rank",
            cause="The loop accumulates gradients by a counter of its own, whose steps depend on the processes.",
            fix="Call optimizer.step() in every pass; global_batch already accumulates. "
            "For several steps use loader.step.",
        )


def straddling() -> TrainError:
    """Return the error for a backward pass that belongs to the micro-batch before."""
    return TrainError(
        "the next batch was read between the forward and the backward pass of a body",
        cause="Gradients would count for another micro-batch than the one that they were computed from.",
        fix="Read a batch at the start of the body: for batch in loader. DataLoader(num_workers=2) reads ahead.",
    )


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


def check_settings(trained: Sequence[Trained], step: Step) -> None:
    """Check that the optimizers' settings are those from the step's begin.

    Raises:
        TrainError: One has changed, such as the learning rate.
    """
    for each in trained:
        for before, now in zip(each.settings, each.read_settings(), strict=False):
            names = [name for name in now if before.get(name) != now[name]]
            if names:
                # torch's mark of a scheduler on the optimizer that it was made for
                is_scheduled = hasattr(each.optimizer.step, "_wrapped_by_lr_sched")
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


def check_strays(trained: Trained, step: Step) -> None:
    """Check that an optimizer acts only on gradients that were summed over the ranks.

    Raises:
        TrainError: A parameter has another one.
    """
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
    """Check that gradients are dropped for all parameters of an optimizer.

    Args:
        trained: The optimizer.
        named: Parameters whose gradients the loop drops, of any shape.

    Raises:
        TrainError: It has others.
    """
    if not set(trained.parameters) <= set(named):
        raise TrainError(
            "the loop drops gradients of a part of an optimizer's parameters, between backward() and step()",
            given="zero_grad() of a module",
            fix="Call optimizer.zero_grad(), or detach() what shall have no gradient.",
        )
