"""Select the communication backend of a world: gloo, NCCL or MPI."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.cluster.rendezvous import RankInfo, ranks_text
from lockstep.errors import LaunchError


def choose_backend(infos: Sequence[RankInfo]) -> tuple[str, str]:
    """Select the backend from all ranks' information. Every rank computes the same result.

    Args:
        infos: All ranks, by rank.

    Returns:
        The backend, and a warning or an empty text.

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
    if asked == "mpi" and not dist.is_mpi_available():
        raise LaunchError(
            "cluster.backend is mpi, but this torch was built without MPI",
            given=f"torch {torch.__version__}",
            allowed="auto, gloo, nccl",
            fix="Set cluster.backend=auto, or install a torch that was built with MPI.",
        )
    if asked == "nccl" and device != "cuda":
        raise LaunchError(
            "cluster.backend is nccl, but the device is cpu", fix="Set cluster.backend=gloo or device=cuda."
        )
    shared = [info.host for info in infos if sum(c.host == info.host for c in infos) > info.num_gpus]
    if device == "cuda" and shared and asked != "mpi":
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
