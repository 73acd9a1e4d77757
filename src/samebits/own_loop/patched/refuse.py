"""What `samebits launch` refuses in a script, with the line, the reason, and what to write instead."""

import linecache
import sys
from types import FrameType

from torch.autograd.function import FunctionCtx

from samebits.errors import ConfigError, SamebitsError
from samebits.frames import callers, is_user

RAISED: list[
    SamebitsError
] = []  # in this process: a script may catch the errors of a pass, and continue
_OWN_LOOP = """Make the loop exact by hand, and start the script with torchrun (docs/own-loop.md):
-model = DDP(model)
+model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=64, micro_batch=16)"""
# What, cause and fix; then the lines that replace that of the script, if it is the wrong one.
FRAMEWORKS = {  # what is exact, and the line that makes it
    "lightning": (
        "ExactStrategy",
        "trainer = Trainer(strategy=ExactStrategy(global_batch=64), devices=int(os.environ['LOCAL_WORLD_SIZE']))",
    ),
    "accelerate": (
        "ExactAccelerator",
        "accelerator = ExactAccelerator(global_batch=64)  # instead of Accelerator()",
    ),
    "transformers": (
        "ExactTrainer",
        "trainer = ExactTrainer(global_batch=64, ...)  # instead of Trainer(...)",
    ),
}
_TEXTS: dict[str, tuple[str, ...]] = {
    "no sizes": (
        "the batch sizes are not given: the DataLoader has batch_size={size}, and the script sees {replicas} processes",
        "A number of processes that is part of the batch gives another model in each world.",
        "Add --global-batch {total} --micro-batch {size}, as torchrun trains now, and keep both at any number.",
    ),
    "other size": (
        "the DataLoader has batch_size={size}, and neither --micro-batch nor --global-batch is that",
        "The script sees {replicas} processes = global batch / micro-batch.",
        "Give --global-batch {total} --micro-batch {size}, or another batch size to the script.",
    ),
    "backward": (
        "backward() outside of the loop over the training data",
        "The script reads its batches without a DataLoader, or from {read}. Samebits trains on the first DataLoader "
        "with shuffle=True or a DistributedSampler that shuffles, read while a model is in training mode.",
        "Set shuffle=True, or call model.train() before the loop. Otherwise: " + _OWN_LOOP,
    ),
    "stage": (
        "backward() in a loop over a second training DataLoader, {read}",
        "A run trains on one DataLoader, and on those that the same line makes in its place, of equal sizes.",
        "Train each stage by a script of its own, from the weights of the one before, or make both by one line.",
    ),
    "second": (
        "a second DataLoader is read inside the training loop",
        "Its batches depend on the process, and on the number of micro-batches.",
        "Join both datasets in one whose __getitem__ returns a sample of each, and read one DataLoader.",
    ),
    "nothing": (
        "the script ended, and no training was recognized",
        "It has loaded a checkpoint of its last epoch, only evaluates, or trains in processes of its own or in a loop "
        "without a DataLoader.",
        "Remove the checkpoint to train again. Start an evaluation with torchrun. Otherwise: "
        + _OWN_LOOP,
    ),
    "part": (
        "{part} reads, splits or averages the training itself",
        "The exact order of samples and sums replaces a plain DataLoader, DistributedDataParallel and optimizer only.",
        "Use these, or leave it out.",
    ),
    "framework": (
        "{framework} reads and splits the training itself",
        "Its DataLoaders and sums replace those of torch, which samebits launch would make exact.",
        "Use its exact form, and leave out --global-batch and --micro-batch here:\n"
        "+from samebits.integrations.{framework} import {exact}\n+{made}",
    ),
    "by hand": (
        "--global-batch is given, and the script has an exact loop of its own",
        "Both would split the batch.",
        "Leave out --global-batch and --micro-batch.",
    ),
    "batch norm": (
        "torch's SyncBatchNorm sums statistics over the processes",
        "The order of its sums, and the batch that it sees, depend on their number.",
        "Leave it out: batch norm then uses each micro-batch's statistics.",
        "",
    ),
    "process": (
        "the script starts processes of its own",
        "What they train would be another model at each number of them.",
        "Call the function here once: the launcher has started the processes. If it doesn't train, give daemon=True.",
        'train(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))',
    ),
    "plateau": (
        "ReduceLROnPlateau decides by a number of the script",
        "A loss of the script depends on the number of processes, at least in its last bits.",
        "Use a schedule of the epoch, or samebits.exact(...) with sums() of a samebits.EvalLoader:",
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)",
    ),
    "world": (
        "{part} has {given}, and the script sees {replicas} processes = global batch / micro-batch",
        "What the script computes from the number of processes belongs to the result.",
        "Give a --global-batch of that many micro-batches, or read rank and world size from the environment:",
        'dist.init_process_group("gloo")',
    ),
    "collective": (
        "{part}() in the training loop before backward() that reaches the loss, or of gradients or other large tensors",
        "Its result can reach the weights, and depends on the processes. Gradients are summed already.",
        "Leave it out, or move it behind optimizer.step() if it is for the log:",
        "",
    ),
    "state": (
        "{part}() of weights or buffers of the model",
        "They are equal on all processes. Their mean over the processes that the script saw at its start is not.",
        "Leave it out:",
        "",
    ),
    "carried": (
        "the first micro-batch of a step gives another gradient when it is repeated",
        "The loop keeps or counts something from one micro-batch to the next: a counter in the loss, a hidden state, a "
        "bank of features, a generator of its own. Which one comes before depends on the processes.",
        "Count steps by the DataLoader, draw from torch's, numpy's or Python's own random functions, and leave out "
        "what is kept, or keep it in a buffer that changes once a step and that its module's class lists: "
        "averaged_buffers = ('center',).\n+    step = loader.step  # instead of a counter",
    ),
    "counted": (
        "the training loop ends, or trains in another way, after a number of passes",
        "A step has several passes on each process, and how many depends on the processes.",
        "Count steps instead, which the DataLoader does, or end by the number of enumerate() before the batch is "
        "trained on:",
        "{instead}",
    ),
    "decided": (
        "training ends, or a learning rate is set, by {number}, which the training loop computes",
        "It is that of the passes of one process, and depends on the number of processes.",
        "Decide by an evaluation behind model.eval() in which each process reads all samples, or by the epoch.",
    ),
    "ahead": (
        "a batch is read before the one before it is trained on",
        "The script reads ahead, as a prefetcher does, or it reads batches without training on them. Gradients would "
        "count for another batch.",
        "Read each batch where it is trained on: for batch in loader. num_workers of the DataLoader reads ahead.",
    ),
    "weights": (
        "a checkpoint of step {step} was loaded, and training begins at step {begin}",
        "It could be a resume, or a new run from these weights, which has another order of samples.",
        "To begin a new run from these weights, give another --seed. To resume, one of:\n"
        "+optimizer.load_state_dict(checkpoint['optimizer'])  # saved with the weights\n"
        "+loader.sampler.set_epoch(epoch)  # of a DistributedSampler, in each epoch",
    ),
    "repeated": (
        "epoch {epoch} is trained again after a resume: the checkpoint is of step {step}",
        "The script saves the number of its last epoch, and begins with it. Its schedule would be stepped twice.",
        "Begin with the next one:\n+start_epoch = checkpoint['epoch'] + 1",
    ),
}


def refusal(name: str, line: str = "", **values: object) -> ConfigError:
    """Make the error of a name, for a line of the script ("FILE:NUMBER"), with the values that its texts name."""
    what, cause, fix, *instead = (text.format(**values) for text in _TEXTS[name])
    file, _, number = line.rpartition(":")
    if instead == [""] and linecache.getline(file, int(number or 0) - 1).rstrip().endswith(":"):
        instead = ["pass"]  # it is the only line of its block
    if instead and (old := linecache.getline(file, int(number or 0)).rstrip()):
        indent = old[: len(old) - len(old.lstrip())]
        fix = "\n".join(
            [
                fix,
                f"-{old}",
                *(f"+{indent}{line}" for each in instead for line in each.splitlines()),
            ]
        )
    RAISED.append(error := ConfigError(what, where=line, cause=cause, fix=fix))
    return error


def user_line() -> str:
    """Return file and line of the innermost frame of the user: "train.py:12"; empty if there is none.

    Within an `autograd.Function` it is the line that applies it: without it both of its passes go.
    """
    frames = [each for each in callers(sys._getframe(1)) if is_user(each.f_code.co_filename)]
    applied = [number for number, each in enumerate(frames) if _is_function(each)]
    frame = next(iter(frames[max(applied, default=-1) + 1 :]), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _is_function(frame: FrameType) -> bool:
    first = next((frame.f_locals.get(name) for name in frame.f_code.co_varnames[:1]), None)
    return frame.f_code.co_name == "forward" and isinstance(first, FunctionCtx)


def check_framework() -> None:
    """Refuse the loop of a framework that calls a function here."""
    files = [
        each.f_code.co_filename.rpartition("-packages/")[2] for each in callers(sys._getframe())
    ]
    for name, (kind, made) in FRAMEWORKS.items():
        if any(file.startswith((f"{name}/", f"pytorch_{name}/")) for file in files):
            raise refusal("framework", user_line(), framework=name, exact=kind, made=made)
