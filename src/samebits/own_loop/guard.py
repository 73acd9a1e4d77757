"""What a loop can do wrong in a step, in one table: the problem, what is given, the cause, and what to write instead.

Each error names the line of the script that was running.
"""

import sys

from torch import nn

from samebits.errors import TrainError
from samebits.frames import callers, is_user

_STEP = "step {step:,}, counted from 0"
_NUM = "step {step:,}, {num} micro-batches on this rank"
_IN_EVERY_PASS = (
    "Call optimizer.step() in every pass; global_batch already accumulates. "
    "For several steps use loader.step."
)
# The problem, what is given, the cause, and the fix.
_TEXTS: dict[str, tuple[str, str, str, str]] = {
    "not finite": (
        "the gradient is not finite",
        "step {step:,}, epoch {epoch}, both counted from 0; weights are those before this step, on all ranks",
        "The loss of a micro-batch is not finite, or its gradient overflowed.",
        "Lower the learning rate, clip gradients, or check the inputs and losses of step {step:,} for NaN. "
        "With a GradScaler, give it to exact(per_step=[scaler]).",
    ),
    "schedule": (
        "{name} of the optimizer changed within a step: {before} -> {now}",
        _NUM,
        "A scheduler is stepped after each micro-batch, so its schedule depends on their number.",
        "Make the scheduler after exact(), from len(loader), and give it to loader.per_step(scheduler); or step it "
        "after each epoch.",
    ),
    "setting": (
        "{name} of the optimizer changed within a step: {before} -> {now}",
        _NUM,
        "The script sets it in each micro-batch, from a number that depends on the processes.",
        "Set it from loader.step, equal in all passes of a step: {name} = f(loader.step).",
    ),
    "second step": (
        "the loop called optimizer.step() twice in one micro-batch",
        "{kind}",
        "An optimizer acts once a step, on the sum over its micro-batches, so the second update would be lost.",
        "Add the losses, and call backward() and optimizer.step() once.",
    ),
    "unfrozen": (
        "a parameter of shape {shape} was unfrozen within a step",
        _STEP,
        "Its gradient has no part in the sum over the ranks, which is laid out when a step begins.",
        "Set requires_grad before the loop, or after optimizer.step() if loader.sync_gradients.",
    ),
    "part": (
        "the loop drops gradients of a part of an optimizer's parameters, between backward() and step()",
        "zero_grad() of a module",
        "",
        "Call optimizer.zero_grad(), or detach() what shall have no gradient.",
    ),
    "unequal drops": (
        "zero_grad() after backward() drops gradients in some micro-batches of a step only",
        "",
        "The loop skips a micro-batch after its backward pass, or calls zero_grad() by a counter.",
        "Decide before backward(), or call zero_grad() in every pass.",
    ),
    "lost": (
        "the checkpoint was saved while accumulated gradients waited for optimizer.step(), and does not hold them",
        "",
        "The steps of an epoch are no multiple of those that the loop accumulates over, so the rest of one epoch "
        "is added to the next one, and a resume would leave it out.",
        "Drop the rest with optimizer.zero_grad() at the start of each epoch, or apply it in the last step, as by "
        "if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader).",
    ),
    "calls": (
        "the loop called optimizer.step() in some micro-batches of a step only{where}",
        "step {step:,}: {num_calls} calls in {num} micro-batches",
        "The loop accumulates gradients by a counter of its own, or skips micro-batches.",
        _IN_EVERY_PASS,
    ),
    "steps": (
        "the loop called optimizer.step() in some steps and not in others",
        _NUM,
        "The loop accumulates gradients by a counter of its own, whose steps depend on the processes.",
        _IN_EVERY_PASS,
    ),
    "follower": (
        "the loop called {name}() of {kind} in some micro-batches of a step only",
        "step {step:,}: {num_calls} of {num} micro-batches",
        "The loop counts passes itself, whose number depends on the processes.",
        "Call it in every pass; it acts once a step. For every second step: "
        "if loader.sync_gradients and loader.step % 2 == 0: ... {name}()",
    ),
    "late": (
        "the next batch was read between the forward and the backward pass of a body",
        "",
        "Gradients would count for another micro-batch than the one that they were computed from.",
        "Read a batch at the start of the body: for batch in loader. DataLoader(num_workers=2) reads ahead.",
    ),
    "by hand": (
        "the loop sets a gradient itself: p.grad of a parameter of shape {shape} is none that backward() made",
        _STEP,
        "Only backward() adds the gradients of a step's micro-batches. One that is computed by torch.autograd.grad() "
        "or put together by hand, as PCGrad does, is that of a single micro-batch.",
        "Add the losses, each with its weight, and call backward() once: (a + weight * b).backward(). A function of "
        "p.grad alone belongs into the step's last pass: if loader.sync_gradients: ...",
    ),
    "no gradient": (
        "optimizer.step() finds no gradient, although backward() has made some: this step would train nothing",
        _STEP,
        "zero_grad() is called, or p.grad is set to None, between backward() and step().",
        "Call zero_grad() before backward().",
    ),
    "graph": (
        "backward(create_graph=True) makes gradients that have a graph, and their sum over a step has none",
        _STEP,
        "Derivatives of a gradient would be those of one micro-batch, as in AdaHessian or a step of meta-learning.",
        "Leave out create_graph=True. A penalty on gradients goes into the loss: "
        "torch.autograd.grad(loss, inputs, create_graph=True), then (loss + penalty).backward().",
    ),
    "noise": (
        "the loop changes gradients by random numbers that it draws between backward() and optimizer.step()",
        _STEP,
        "They follow those of the step's last micro-batch on this process, which is another one in each world.",
        "Draw them from a generator of the step: generator = torch.Generator().manual_seed(loader.step), then "
        "torch.randn(p.shape, generator=generator). Or draw them in step() of the optimizer.",
    ),
    "samples": (
        "a sample has other values when it is read again",
        "sample {number:,}, with equal random numbers of torch, numpy and Python",
        "The dataset or collate_fn has a random generator of its own, as some libraries of augmentations have, counts "
        "its calls, or changes its samples in place.",
        "Draw from the random functions of torch, numpy or Python in __getitem__, without a generator and a seed of "
        "your own, and copy what it changes.",
    ),
    "threads": (
        "torch has {now} threads, and exact() has set {before}",
        "torch.set_num_threads({now})",
        "Kernels split their sums by the number of threads, so it belongs to the result.",
        "Leave out torch.set_num_threads(), and give exact(num_threads={now}), equal at any number of processes.",
    ),
    "length": (
        "the dataset has {now:,} samples, and had {before:,} when exact() was called",
        "",
        "The order of an epoch is laid out for the samples that there were.",
        "Call exact() again with the new DataLoader, then loader.set_epoch(0).",
    ),
    "order": (
        "the optimizer has its parameters in another order than {there}",
        "{given}",
        "Parameter groups are made from a set, whose order is another one in each process. States of the optimizer go "
        "by the position in it.",
        "Make the groups from lists: [p for name, p in model.named_parameters() if name in names].",
    ),
    "drawn": (
        "only some ranks draw random numbers in the body of the loop before its forward pass",
        "{given}",
        "They evaluate or draw samples there, such as rank 0 by a counter. Dropout then has other numbers.",
        "Do it after optimizer.step().",
    ),
    "ranks": (
        "the ranks differ after step {step:,}: first in {name}, {num} in all",
        "{given}",
        "The script changes weights, gradients or optimizers on one rank only or by random numbers, sets a learning "
        "rate by the loss of one rank, or ranks loaded other checkpoints. A gradient that is changed by hand may only "
        "depend on p.grad.",
        "Do on every rank what changes the model. Give a scheduler such as ReduceLROnPlateau the loss of all ranks, by "
        "samebits.EvalLoader. Before a validation, call model.eval().",
    ),
    "script": (
        "the ranks differ in {name}",
        "{given}",
        "Another version of the script or of a package is on one machine, or arguments differ by rank.",
        "Start all ranks with the same files and the same arguments.",
    ),
    "start": (
        "{what}, and the loader begins at step 0",
        "",
        "A checkpoint was loaded without the loader's position: epochs would be trained again.",
        "Save loader.state_dict() and load it by loader.load_state_dict(), or call loader.set_epoch(epoch) before the "
        "loop. To begin with epoch 0 on purpose: loader.set_epoch(0).",
    ),
    "inside": (
        "the loop over the exact loader ended inside a step",
        "after {num} bodies; step {step:,} has {all} on this rank, and {run} were run",
        "The loop counts bodies, by len(loader), next() or a limit of iterations. Their number depends on the number "
        "of processes; len(loader) is the number of steps.",
        "Write: for batch in loader. To stop earlier: if loader.sync_gradients and loader.step == STEPS: break. "
        "loader.micro_batches_per_epoch is the number of bodies of a pass.",
    ),
    "within": (
        "the loop over the exact loader ended within an epoch",
        "after {num:,} bodies and step {step:,} of {stop:,}",
        "The loop counts bodies, whose number depends on the number of processes.",
        "Count steps: if loader.sync_gradients and loader.step == STEPS: break.",
    ),
    "nothing": (
        "a pass over the exact loader trained nothing: no backward() and no optimizer.step()",
        "{num:,} batches read, from step {step:,} on",
        "Each rank reads only its share, so what such a pass computes depends on the number of processes.",
        "For statistics, iterate over the DataLoader that exact() was given, or over a samebits.EvalLoader.",
    ),
    "no gradient of the loss": (
        "the loss of a micro-batch has no gradient",
        "",
        "It was detached, computed by argmax() or from whole numbers, or under torch.no_grad().",
        "Compute it from the model's outputs with differentiable torch functions.",
    ),
    "many losses": (
        "the loss of a micro-batch is not one number",
        "",
        "With reduction='none', a loss has one value for each sample.",
        "Take the mean over the micro-batch's samples: loss.mean().backward().",
    ),
    "disk": (
        "a file could not be written, and may be incomplete",
        "",
        "The disk is full, a quota is reached, or the folder is gone.",
        "Free space, then resume from the checkpoint before. To keep it until the next one is whole, save to another "
        "name, then os.replace(name, path).",
    ),
    "peer": (
        "another process has ended, or takes part in another collective call",
        "",
        "Its own error is the first one in the output. Or the script calls all_gather() with a tensor whose shape "
        "differs between the ranks, as the shares of an evaluation do.",
        "Mend the first error. Gather results of unequal shares by collect() and collected() of a samebits.EvalLoader.",
    ),
    "kept": (
        "the loop changes {name} in each micro-batch, and the loss depends on it",
        "",
        "How often it changes before a step, and by which samples, depends on the number of processes.",
        "Use loader.step instead of a counter. Change what is kept once a step, under if loader.sync_gradients, by "
        "values that are equal on all ranks.",
    ),
    "second loader": (
        "the loop reads a second DataLoader in each micro-batch, and the loss depends on it",
        _STEP,
        "Which of its batches goes with a micro-batch depends on the processes: each reads it from the start.",
        "Give exact() one dataset whose __getitem__ returns a sample of each, or choose the second one by "
        "torch.randint() in __getitem__. A loader that is only measured may go on in a validation.",
    ),
    "outside": (
        "{name}, in training mode, changes its running statistics in the loop, and exact() was not given it",
        _STEP,
        "They follow from the micro-batches that this process had: a teacher or an average of the weights then differs "
        "at each number of processes.",
        "Call {name}.eval() after model.train(). Or give it too, to average them over each step: "
        "exact([model, {name}], ...); with Lightning, make it an attribute of the LightningModule.",
    ),
    "carried": (
        "the first micro-batch of a step gives another gradient when it is repeated",
        _STEP,
        "The loop keeps or counts something from one micro-batch to the next: a counter in the loss, a hidden state, "
        "a bank of features, a random generator of its own, a second DataLoader. Which one comes before depends on the "
        "processes. Or it trains differently if loader.is_padding.",
        "Use the number of the step instead of a counter: loader.step, with the Trainer self.state.global_step. Use "
        "the random functions of torch, numpy or Python without a generator. Leave out what is kept, or keep it in a "
        "buffer that changes once a step and that its module's class lists: averaged_buffers = ('center',). Let "
        "micro-batches that are padding train as the others.",
    ),
}


def fault(name: str, /, **values: object) -> TrainError:
    """Make the error of a name in the table, with the values that its texts name."""
    what, given, cause, fix = (text.format(**values) for text in _TEXTS[name])
    return TrainError(what, given=given, where=script_line(), cause=cause, fix=fix)


def script_line() -> str:
    """Return the innermost line of the script that is running: "train.py:12"; empty if there is none."""
    files = ((each.f_code.co_filename, each.f_lineno) for each in callers(sys._getframe(1)))
    return next((f"{file}:{line}" for file, line in files if is_user(file)), "")


def variable_of(module: nn.Module) -> str:
    """Return the name of the running script's variable that has a module, or of the module's class."""
    for frame in callers(sys._getframe(1)):
        if is_user(frame.f_code.co_filename):
            for name, value in {**frame.f_globals, **frame.f_locals}.items():
                # not isinstance(): it may run code of the value
                if issubclass(type(value), nn.Module) and module in value.modules():
                    return name
    return type(module).__name__
