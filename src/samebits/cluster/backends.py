"""The communication backend of a world: gloo or NCCL. gloo has two process groups, one for each direction.

Two ranks that exchange values send to each other at the same time. On one connection, a rank's gloo thread then
receives in the middle of the main thread's send, and needs the lock that the send holds. It tries again and again,
often on the main thread's core, until the system takes the core away, milliseconds later. With a group for messages to
higher ranks and another one for those to lower ranks, values arrive on another connection than they are sent.
`python -m benchmarks.exact_cost --one-group` measures both.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from samebits.cluster.rendezvous import RankInfo, ranks_text
from samebits.errors import LaunchError

# Each group connects each rank to all others. Larger worlds have the default group's connections only.
MAX_RANKS = 64
# Of each default group, the group of messages to higher ranks.
# Weak, so that this table does not keep a group that was destroyed.
_UPWARDS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def choose_backend(infos: Sequence[RankInfo]) -> tuple[str, str]:
    """Select the backend from all ranks' `infos`, equally on all; return it with a warning or "".

    Raises:
        LaunchError: The ranks use different kinds of device, or the backend is not available.
    """
    for name in ("device", "backend"):
        groups: dict[str, list[int]] = {}
        for info in infos:
            groups.setdefault(getattr(info, name), []).append(info.rank)
        if len(groups) > 1:
            parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in groups.items()]
            raise LaunchError(
                f"the processes don't agree on the {name}: {', '.join(parts)}",
                fix=f"Set {'device=cpu or device=cuda' if name == 'device' else 'cluster.backend'} for all processes.",
            )
    device, asked = infos[0].device, infos[0].backend
    if asked == "nccl" and device != "cuda":
        raise LaunchError(
            "cluster.backend is nccl, but the device is cpu", fix="Set cluster.backend=gloo or device=cuda."
        )
    shared = [info.host for info in infos if sum(c.host == info.host for c in infos) > info.num_gpus]
    if device == "cuda" and shared:
        # NCCL does not support two ranks on one GPU.
        count = sum(info.host == shared[0] for info in infos)
        gpus = next(info.num_gpus for info in infos if info.host == shared[0])
        if asked == "nccl":
            raise LaunchError(
                f"cluster.backend is nccl, but {count} processes share {gpus} GPU(s) on {shared[0]}",
                fix=f"Start at most {gpus} there, or set cluster.backend=gloo.",
            )
        return "gloo", f"warning: {count} processes share {gpus} GPU(s) on {shared[0]}: gloo instead of nccl, slower"
    if asked != "auto":
        return asked, ""
    return ("nccl" if device == "cuda" else "gloo"), ""


def add_group() -> None:
    """Start the second group of the default group, if that is gloo's. All ranks call this.

    It has the timeout of the default group, and ends with it, in torch's `destroy_process_group()`.
    """
    if dist.get_backend() == "gloo" and 1 < dist.get_world_size() <= MAX_RANKS:
        # Neither the default group nor its timeout has a public name.
        default = dist.distributed_c10d._get_default_group()
        timeout = default._get_backend(torch.device("cpu")).options._timeout
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
        _UPWARDS[default] = group


def group_for(peer: int, *, is_receive: bool, default: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the group of a message from or to a rank of `default`, the default group; None: the present one."""
    default = default or dist.distributed_c10d._get_default_group()
    # A message goes upwards if it is received from a lower rank, or sent to a higher one.
    is_upwards = (peer < default.rank()) == is_receive
    return _UPWARDS.get(default, default) if is_upwards else default
