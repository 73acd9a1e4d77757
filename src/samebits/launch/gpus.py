"""What is known about GPUs before torch is imported, which takes seconds."""

import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path

from samebits.errors import LaunchError

# Device files of CUDA (also on Jetson and WSL) and of ROCm, whose devices torch calls cuda too.
_DEVICE_FILES = ("nvidia*", "nvmap", "nvhost*", "dxg", "kfd")


def check_device(device: str, folder: Path = Path("/dev")) -> None:
    """Check that a device which a user has set can exist on this machine.

    Only what is certain is refused. Whether torch can use a GPU that is there is checked when a process has imported
    torch.
    """
    if device != "cuda":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # From the package's metadata: importing torch takes seconds, and this is checked before any process starts.
    torch = version("torch")
    if torch.endswith("+cpu"):
        cause, fix = "this build of torch has no CUDA", "Set device=cpu, or install a build of torch with CUDA."
    elif visible is not None and visible.strip() in ("", "-1"):
        cause, fix = "CUDA_VISIBLE_DEVICES hides all GPUs", "Set device=cpu, or unset CUDA_VISIBLE_DEVICES."
    elif sys.platform == "linux" and not any(path for name in _DEVICE_FILES for path in folder.glob(name)):
        cause, fix = "this machine has no GPU, or its driver is not loaded", "Set device=cpu, or check nvidia-smi."
    else:
        return
    raise LaunchError(
        "device is cuda, but there is no CUDA device",
        given=f"torch {torch}, CUDA_VISIBLE_DEVICES={'not set' if visible is None else visible}",
        where=socket.gethostname(),
        cause=cause,
        fix=fix,
    )
