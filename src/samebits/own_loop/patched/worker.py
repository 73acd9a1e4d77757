"""One process of `samebits launch`: replaces torch's classes, then runs the script as Python would; see `script.py`.

    python -m samebits.own_loop.patched.worker [-m] SCRIPT ARGUMENTS...

They are replaced for the life of the process, before the script is imported. Methods are replaced in their classes, so
that it does not matter by which name a script imports them.
"""

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

from samebits.cluster import collectives
from samebits.data.seeding import seed_forward
from samebits.errors import SamebitsError
from samebits.frames import error_line, is_user
from samebits.module.determinism import set_kernels
from samebits.own_loop.current import current_world
from samebits.own_loop.ending import report_errors
from samebits.own_loop.loader import CARRIED
from samebits.own_loop.patched.records import read_record, save_with_record
from samebits.own_loop.patched.refuse import RAISED, check_framework, refusal, user_line
from samebits.own_loop.patched.samplers import share, share_length
from samebits.own_loop.patched.script import Script
from samebits.own_loop.patched.turns import be_silent, end_turn, speak, wait_for_turn
from samebits.own_loop.session import ExactLoop

_CORE = f"{Path(__file__).parents[2]}/"
_GROUPS = f"{Path(dist.__file__).parent}/"  # torch's own collectives count the processes that run
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "broadcast",
    "broadcast_object_list", "scatter", "all_to_all", "all_to_all_single", "reduce_scatter_tensor",
)  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, in this process."""
    report_errors()
    # The set-up counts too: first weights are drawn there, before exact() sets and seeds what it needs.
    set_kernels(1, torch.device("cpu"))
    script = Script()
    seed_forward(script.seed, torch.device("cpu"))
    install(script)
    is_module = arguments[0] == "-m"
    target = arguments[is_module]
    sys.argv = arguments[is_module:]
    if wait_for_turn(script.world.local_rank):
        be_silent()
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(target))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    except SamebitsError as error:
        error.slots.setdefault("where", error_line(error))
        raise RAISED[0] if RAISED else error from None
    except Exception as error:
        script.explain(error)
        raise
    finally:
        speak()
    if RAISED:
        raise RAISED[0]
    end_turn(script.world.local_rank, is_alone=True)
    script.end()


def _replace(owner: Any, *names: str) -> Callable[[Callable[..., Any]], None]:
    """Decorate what replaces a function of torch, and gets the plain one as its first argument."""

    def decorate(function: Callable[..., Any]) -> None:
        for name in names:
            plain = getattr(owner, name)

            def replaced(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                return function(plain, *args, **kwargs)

            setattr(owner, name, wraps(plain)(replaced))

    return decorate


def install(script: Script) -> None:
    """Replace them for a script."""

    kinds = (
        DataLoader,
        Optimizer,
        LRScheduler,
        ReduceLROnPlateau,
        AveragedModel,
        torch.amp.GradScaler,
    )
    # The schedulers of schedulers do not call LRScheduler.__init__.
    for kind in (*kinds, SequentialLR, ChainedScheduler, nn.SyncBatchNorm):

        @_replace(kind, "__init__")
        def init(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            script.note(self)

    @_replace(DataLoader, "__iter__")
    def iterate(plain: Any, self: DataLoader[Any]) -> Iterator[Any]:
        return script.iterate(self, lambda: plain(self))

    @_replace(DataLoader, "__len__")
    def length(plain: Any, self: DataLoader[Any]) -> int:
        found = script.length(self)
        return int(plain(self)) if found is None else found

    @_replace(torch.autograd, "backward")  # Tensor.backward() calls it
    def backward(plain: Any, *args: Any, **kwargs: Any) -> None:
        try:
            script.begin_backward()
            plain(*args, **kwargs)
        except SamebitsError as error:
            RAISED.append(error)
            raise

    @_replace(ExactLoop, "__init__")
    def make_loop(plain: Any, self: ExactLoop, *args: Any, **kwargs: Any) -> None:
        script.note_loop(self)
        plain(self, *args, **kwargs)

    @_replace(BaseProcess, "start")
    def start(plain: Any, self: Any) -> None:
        if is_user(
            sys._getframe(2).f_code.co_filename
        ):  # behind `replaced`; others are of DataLoaders and pools
            script.check_process(self)
        plain(self)

    for name in ("step", "sync_gradients", "is_padding"):
        # What a fix names: `loader` is the DataLoader of the script, whose training may not have begun.
        setattr(
            DataLoader,
            name,
            property(partial(lambda name, _: getattr(script.exact, name, 0), name)),
        )

    _replace_files(script)
    _replace_samplers(script)
    _replace_wrappers(script)
    _replace_process_group(script)


def _replace_files(script: Script) -> None:
    folders: set[str] = set()  # that this process has for itself

    @_replace(tempfile, "mkdtemp")
    def make(plain: Any, *args: Any, **kwargs: Any) -> Any:
        folders.add(os.path.realpath(folder := plain(*args, **kwargs)))
        return folder

    @_replace(torch, "save")
    def save(plain: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        is_shared = isinstance(f, str | os.PathLike) and folders.isdisjoint(
            map(str, Path(os.path.realpath(f)).parents)
        )
        # All ranks of a script for one process would write the same file at once.
        if script.world.has_group or script.world.rank == 0 or not is_shared:
            # A script may save what it has loaded before it trains on.
            position = script.record if script.exact is None else script.exact.position()
            if position is None:
                plain(obj, f, *args, **kwargs)
            else:
                save_with_record(lambda file: plain(obj, file, *args, **kwargs), f, position)

    @_replace(torch, "load")
    def load(plain: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if script.exact is None:
            script.record = read_record(f) or script.record
        elif not script.world.has_group:  # rank 0 may still write the file
            with script.world.launcher_environment():
                collectives.any_rank(current_world(torch.device("cpu")), flag=False)
        return plain(f, *args, **kwargs)

    @_replace(Optimizer, "load_state_dict")
    def load_state(plain: Any, self: Optimizer, state_dict: Any) -> None:
        plain(self, state_dict)
        script.has_loaded = True

    for kind in (Optimizer, nn.Module):

        @_replace(kind, "zero_grad")
        def drop(plain: Any, *args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            if script.exact is None and script.record is not None:
                script.record.pop(CARRIED, None)  # it does without them


def _replace_samplers(script: Script) -> None:
    @_replace(DistributedSampler, "__iter__")
    def iterate(plain: Any, self: Any) -> Iterator[int]:
        """Read each sample of an evaluation once, over all processes that run."""
        before = {
            name: getattr(self, name)
            for name in ("num_replicas", "rank", "num_samples", "total_size")
        }
        self.num_replicas = 1
        self.rank = 0
        # A script that drops the rest reads it elsewhere.
        whole = before["total_size"] if self.drop_last else len(self.dataset)
        self.num_samples = self.total_size = whole
        try:
            return share(script, self, list(plain(self)))
        finally:
            vars(self).update(before)

    @_replace(DistributedSampler, "__len__")
    def length(plain: Any, self: Any) -> int:
        found = share_length(script, self)
        return int(plain(self)) if found is None else found


def _replace_wrappers(script: Script) -> None:
    """Let DistributedDataParallel and DataParallel only pass calls on: the exact loop sums gradients."""

    def init(self: Any, module: nn.Module, device_ids: Any = None, *_: Any, **kwargs: Any) -> None:
        if kwargs.get("process_group") not in (None, dist.group.WORLD):
            raise refusal("part", user_line(), part="DistributedDataParallel(process_group=...)")
        check_framework()
        nn.Module.__init__(self)
        self.module = module
        self.device_ids = device_ids
        self.require_backward_grad_sync = True
        script.note(self)
        if isinstance(
            self, DistributedDataParallel
        ):  # all ranks begin with rank 0's weights, as usual
            with script.world.launcher_environment():
                tensors = [*module.parameters(), *module.buffers()]
                collectives.broadcast_tensors(current_world(tensors[0].device), tensors)

    def hook(*_: Any) -> None:
        raise refusal("part", user_line(), part="register_comm_hook()")

    kind: Any
    for kind in (DistributedDataParallel, DataParallel):
        kind.__init__ = init
        kind.forward = lambda self, *args, **kwargs: self.module(*args, **kwargs)
        # Theirs need what their __init__ has made.
        kind.train = nn.Module.train
        kind.__setstate__ = nn.Module.__setstate__
        kind.__getstate__ = (
            nn.Module.__getstate__
        )  # pickles and copies, as AveragedModel(model) makes one
        kind.no_sync = kind.join = lambda self, *args, **kwargs: nullcontext()
        kind.register_comm_hook = hook


def _replace_process_group(script: Script) -> None:
    @_replace(dist.TCPStore, "__init__")  # where the processes meet
    def meet(plain: Any, *args: Any, **kwargs: Any) -> None:
        end_turn(script.world.local_rank, is_alone=script.world.is_alone)
        plain(*args, **kwargs)

    def caller() -> str:
        return sys._getframe(3).f_code.co_filename  # behind the function here and `replaced`

    @_replace(dist, "init_process_group")
    def init(
        plain: Any, backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
        rank: int = -1, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if caller().startswith(_CORE):  # joins the world of the launcher
            plain(backend, init_method, timeout, world_size, rank, *args, **kwargs)
            return
        script.world.check("init_process_group()", world_size, rank)
        with script.world.launcher_environment():
            plain(backend, timeout=timeout, device_id=kwargs.get("device_id"))

    @_replace(dist, "get_world_size")
    def size(plain: Any, group: Any = None) -> int:
        is_seen = group in (None, dist.group.WORLD) and not caller().startswith((_CORE, _GROUPS))
        return (
            script.world.seen_size(caller(), has_begun=script.has_begun)
            if is_seen
            else int(plain(group))
        )

    @_replace(mp, "spawn", "start_processes")
    def spawn(_plain: Any, fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        script.world.check("mp.spawn()", nprocs, None)
        fn(script.world.rank, *args)

    for name in _COLLECTIVES:

        @_replace(dist, name)
        def collective(plain: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            if not caller().startswith(_CORE):
                is_changed = script.check_collective(
                    name, [*args, *kwargs.values()], bool(kwargs.get("async_op"))
                )
                if (
                    name in ("all_gather", "all_gather_object")
                    and args
                    and isinstance(args[0], list)
                ):
                    del args[0][script.world.size :]  # made for the world that the script sees
                if is_changed:
                    plain(*args, **kwargs)
                    results = next(iter([*args, *kwargs.values()]))
                    for each in results if isinstance(results, list) else [results]:
                        # By little: the script may stop at a loss that is not finite.
                        each.detach().mul_(
                            1.25
                        ) if each.is_floating_point() else each.detach().add_(1)
                    return None
            return plain(*args, **kwargs)


if __name__ == "__main__":
    main(sys.argv[1:])
