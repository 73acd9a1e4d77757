"""What `samebits launch` refuses in a script, with the line, the reason, and what to write instead."""

import linecache

from samebits.errors import ConfigError

_OWN_LOOP = """Make the loop exact by hand, and start the script with torchrun (docs/own-loop.md):
-model = DDP(model)
+model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=64, micro_batch=16)"""
# What, cause and fix; then the lines that replace that of the script, if it is the wrong one.
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
    "second": (
        "a second DataLoader that shuffles is read inside the training loop",
        "Its batches depend on the process, and on the number of micro-batches.",
        "Join both datasets in one whose __getitem__ returns a sample of each, and read one DataLoader.",
    ),
    "nothing": (
        "the script ended, and no training was recognized",
        "It trains in processes of its own or in a loop without a DataLoader, or it only evaluates.",
        "Start an evaluation with torchrun. Otherwise: " + _OWN_LOOP,
    ),
    "part": (
        "{part} reads, splits or averages the training itself",
        "The exact order of samples and sums replaces a plain DataLoader, DistributedDataParallel and optimizer only.",
        "Use these, or start with torchrun what samebits.lightning, .accelerate and .transformers have.",
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
        "{part}() in the training loop before backward(), or of gradients or other large tensors",
        "Its result can reach the weights, and depends on the processes. Gradients are summed already.",
        "Leave it out, or move it behind optimizer.step() if it is for the log:",
        "",
    ),
    "average": (
        "weights are averaged by hand in the training loop",
        "The average would move once a micro-batch, whose number depends on the processes.",
        "Use torch's average, which then acts once a step:\n"
        "+average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))\n"
        "+    average.update_parameters(model)  # in the loop, after optimizer.step()",
    ),
    "weights": (
        "a checkpoint of step {step} was loaded, and neither an optimizer's state nor an epoch",
        "It could be a resume, or a new run from these weights, which has another order of samples.",
        "To begin a new run from these weights, give another --seed. To resume:\n"
        "+optimizer.load_state_dict(checkpoint['optimizer'])",
    ),
}


def refusal(name: str, line: str = "", **values: object) -> ConfigError:
    """Make the error of a name, for a line of the script ("FILE:NUMBER"), with the values that its texts name."""
    what, cause, fix, *instead = (text.format(**values) for text in _TEXTS[name])
    file, _, number = line.rpartition(":")
    if instead and (old := linecache.getline(file, int(number or 0)).rstrip()):
        indent = old[: len(old) - len(old.lstrip())]
        fix = "\n".join([fix, f"-{old}", *(f"+{indent}{each}" for each in instead if each)])
    return ConfigError(what, where=line, cause=cause, fix=fix)
