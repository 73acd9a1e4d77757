"""Fingerprints of a run: digests of code, data and environment, compared between ranks and at a resume.

Why: gradients are shared, so ranks with different code or data still agree on all weights. They would train a model of
neither, and no later check could see it.

    take_fingerprint                    on each rank, before the first step
      read 8 + 2 samples, twice      -> data     the second reading must be equal (`self_check`)
      run one micro-batch, twice     -> trial    as above, for loss, gradients and buffers
      hash loaded source files       -> code     last, since the first use of a recipe may import more modules
      versions, kernels, processor   -> environment
    identity.check_ranks_agree          all ranks compare it with rank 0's
    identity.check_unchanged            at a resume, with the checkpoint's
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.division import Alone
from samebits.data.keyed import CHECK, key, keys
from samebits.data.loader import Loader, Request, choose_num_workers
from samebits.data.order import MicroBatch, Order, permute
from samebits.data.samples import (
    Batch,
    Samples,
    as_samples,
    groups_of,
    sample_digests,
    short_digest,
)
from samebits.launch.kernels import cpu_info, describe_processor
from samebits.plain_file import as_dict
from samebits.portable.arithmetic import VERSION
from samebits.provenance.self_check import check_same_samples, try_micro_batch
from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig

# The environment of a run: versions, hardware and commit, for `environment.json`.


# Libraries that compute parts of a run's result.
COMPUTING = (
    "torch", "torchvision", "numpy", "opencv-python-headless", "opencv-python", "pillow", "simplejpeg", "scikit-learn",
)  # fmt: skip
PACKAGES = (*COMPUTING, "safetensors")
# Environment variables by which libraries select their kernels.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
# Properties of the hardware in which ranks may differ without a difference of software.
HARDWARE = ("CPU capability", "CPU vendor", "CPU instructions", "GPU")
PROCESSOR = "processor"


def environment(world: World) -> dict[str, Any]:
    """Describe the environment for which equal weights are promised: versions, hardware, commit and world."""
    return {
        "python": platform.python_version(),
        "packages": {"samebits": __version__}
        | {name: found for name in PACKAGES if (found := version_of(name))},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "gpu": device_name(world.device) if world.device.type == "cuda" else None,
        "cuda": torch.version.cuda if world.device.type == "cuda" else None,
        "commit": commit_of(Path.cwd()),
        "command": sys.argv,
        "world": {
            "size": world.size,
            "backend": world.backend,
            "device": world.device.type,
            "host": world.host,
        },
    }


def describe_kernels(device: torch.device, kernels: str) -> dict[str, str]:
    """Return what determines a run's bits beside code, settings and data: versions, kernels and hardware, by name.

    What the setting `kernels` pins is not a property of the processor any more.
    """
    if kernels == "portable":
        # What computes has no part in the bits; what decodes and draws samples has.
        decoders = {name: version_of(name) for name in COMPUTING if not name.startswith("torch")}
        own = {"samebits": __version__, "arithmetic": VERSION, **decoders}
        return {name: value for name, value in own.items() if value}
    # Versions of the libraries that torch found when it was loaded; some builds share the system's MKL.
    text = torch.__config__.show()
    libraries = {
        "MKL": re.search(r"Math Kernel Library Version (\S+)", text),
        "oneDNN": re.search(r"MKL-DNN v(\S+)", text),
    }
    found: dict[str, str | None] = {
        "samebits": __version__,
        **{name: version_of(name) for name in COMPUTING},
        "torch": torch.__version__,  # with +cpu or +cu126
        **{name: match[1] for name, match in libraries.items() if match},
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        **describe_processor(),
        **{name: os.environ.get(name) for name in VARIABLES},
        PROCESSOR: cpu_name(),
    }
    if device.type == "cuda":
        found |= {
            "GPU": device_name(device),
            "CUDA": torch.version.cuda,
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    return {name: value for name, value in found.items() if value}


@cache
def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Return a device's name: the GPU model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """Return the processor with the details by which kernels are selected: two of one name may differ in their bits."""
    info = cpu_info()
    name = info.get("model name", platform.processor())
    numbers = [
        f"{key.removeprefix('cpu ')} {info[key]}"
        for key in ("cpu family", "model", "stepping")
        if key in info
    ]
    return ", ".join([name, *numbers, torch.backends.cpu.get_cpu_capability()])


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder's repository, 12 digits; None outside of git, or where git does not trust it.

    Uncommitted changes are not detected: to find them, git would run programs that the repository's settings name
    (`core.fsmonitor`, filters). `rev-parse` of a name runs none.
    """
    try:
        found = subprocess.run(
            ["git", "-C", folder, "rev-parse", "--verify", "HEAD"],
            capture_output=True,
            encoding="utf-8",
            timeout=10,  # a file server may hang, and training does not need the commit
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found.stdout[:12] if found.returncode == 0 else None


# number of samples that are read
NUM_TRAIN = 8
NUM_EVAL = 2
NUM_TRIED = 3  # samples of the trial micro-batch; batch norm over two values returns plus and minus one for any input
MAX_FILES = 10_000  # number of files whose size is read: a file server may take 0.1 ms for each
PACKAGE = "code of samebits"
_ROOT = Path(__file__).resolve().parents[1]
Named = dict[str, str]


@dataclass(frozen=True)
class Fingerprint:
    """Digests and versions, by name."""

    environment: Named = field(default_factory=dict)  #: Versions, processor and GPU.
    #: Source files of the package, and of a recipe file with the modules that it imported from its folder.
    code: Named = field(default_factory=dict)
    #: A few samples, chosen and read by keys from the seed; sizes of the files, if the dataset lists them.
    data: Named = field(default_factory=dict)
    #: Initial weights, loss and gradients of one micro-batch on the fresh model. Exact mode only.
    trial: Named = field(default_factory=dict)

    def to_json(self) -> dict[str, Named]:
        """Return the fingerprint as plain JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Fingerprint:
        """Read the fingerprint in a checkpoint; parts that are missing or not text are left out."""
        plain = as_dict(content)
        return cls(
            **{
                part.name: {
                    str(key): str(value) for key, value in as_dict(plain.get(part.name)).items()
                }
                for part in dataclasses.fields(cls)
            }
        )


def take_fingerprint(
    config: RunConfig,
    loss: Callable[[Any, Batch], Mapping[str, Tensor]],
    model: nn.Module,
    data: tuple[Samples, Samples],
    device: torch.device,
    *,
    num_ranks_here: int = 1,
    is_restart: bool = False,
) -> Fingerprint:
    """Take a run's fingerprint. Check that samples and a micro-batch are the same a second time.

    Args:
        config, data: The settings; the training and the validation samples.
        loss: The recipe's loss function; it returns named 0-d tensors.
        model, device, num_ranks_here: The fresh model, on the rank's device; number of ranks on this machine.
        is_restart: Skip the second pass, which ran when the run started.

    Raises:
        ConfigError: The second pass differs.
        SamebitsError: Raised by the dataset.
    """
    is_twice = not is_restart
    found: Named = {}
    tried: Batch | None = None
    micro_batch = _first_micro_batch(config, data[0]) if len(data[0]) else None
    for name, samples, count in (
        ("training", data[0], NUM_TRAIN),
        ("evaluation", data[1], NUM_EVAL),
    ):
        singles = _chosen(samples, config.seed, count)
        more = (
            [(micro_batch.indices, micro_batch.keys)]
            if micro_batch is not None and samples is data[0]
            else []
        )
        if not singles:
            continue
        requests = [*singles * (2 if is_twice else 1), *more]
        workers = choose_num_workers(
            config.loader.num_workers, samples, device, num_ranks_here=num_ranks_here
        )
        # With a worker process if training uses workers: a dataset that opens its files at the first read would
        # otherwise pass this process's open files to all workers, which would then share one file position.
        reader = Loader(
            samples,
            partial(iter, requests),
            device,
            num_workers=min(1, workers),
            channels_last=config.channels_last,
            # The hang detector starts after the model is built.
            timeout_s=config.watch.hang_timeout_s,
        )
        with closing(reader) as loader:
            first = _digests(loader, singles)
            if is_twice:
                check_same_samples(name, first, _digests(loader, singles))
            tried = loader.batch(*more[0]) if more else tried
        found |= {f"{name} sample {index}": digest for index, digest in first.items()}
        if sizes := digest_of_sizes(samples):
            found[f"sizes of the {name} files"] = sizes
    trial: Named = {}
    if micro_batch is not None and tried is not None:
        trial = try_micro_batch(model, loss, tried, micro_batch.forward_key, device, twice=is_twice)
    # Last: a recipe's modules may import others when they are first used.
    return Fingerprint(
        describe_kernels(device, config.kernels), code_digests(config.recipe), found, trial
    )


def code_digests(recipe: str) -> Named:
    """Return digests of the package's files, and of a recipe file with the loaded modules in or below its folder."""
    digests = {PACKAGE: _package_digest()}
    if recipe.endswith(".py"):
        path = Path(recipe)
        for file in sorted({path, *_modules_below(path.parent)}):
            try:
                content = file.read_bytes()
            except OSError:
                continue  # the file was removed after its import
            name = file.relative_to(path.parent).as_posix()
            digests[f"code of {name}"] = short_digest(hashlib.sha256(content).digest())
    return digests


@cache  # once per process: it reads every file of the package
def _package_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(_ROOT.rglob("*.py")):
        digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return short_digest(digest.digest())


def _modules_below(folder: Path) -> Iterator[Path]:
    """Yield the files of loaded modules in a folder, without installed packages and Samebits itself."""
    installed = {Path(sys.prefix), Path(sys.base_prefix), _ROOT}
    # Compared as text first, since thousands of modules are loaded.
    start = "" if folder == Path() else os.path.join(folder, "")
    # A copy of the list: reading an attribute of a lazy module may import others.
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.startswith(start):
            continue
        path = Path(name)
        if path.is_relative_to(folder) and not any(path.is_relative_to(each) for each in installed):
            yield path


def _first_micro_batch(config: RunConfig, samples: Samples) -> MicroBatch:
    """Return the run's first micro-batch, truncated: a few samples show as much as all of them."""
    order = Order(
        len(samples), config.global_batch, config.micro_batch, config.seed, groups_of(samples)
    )
    # The first micro-batch is the same in every world.
    whole = next(order.steps(Alone(), stop=1)).micro_batches[0]
    return dataclasses.replace(
        whole, indices=whole.indices[:NUM_TRIED], keys=whole.keys[:NUM_TRIED]
    )


def _chosen(samples: Samples, seed: int, count: int) -> list[Request]:
    """Choose samples by the seed, each as a request of its own, with the keys of their first epoch.

    One per request, because samples of different sizes cannot share a batch.
    """
    size = len(samples)
    if not size:
        return []
    indices = permute(np.arange(min(size, count)), size, key(seed, CHECK))
    return [
        (indices[at : at + 1], keys(seed, 0, indices[at : at + 1])) for at in range(len(indices))
    ]


def _digests(loader: Loader, requests: Sequence[Request]) -> dict[int, str]:
    """Read samples and return the digest of each."""
    digests: dict[int, str] = {}
    for request in requests:
        digests |= sample_digests(loader.raw(*request))
    return digests


def digest_of_sizes(samples: Samples) -> str | None:
    """Return a digest of the names and sizes of a dataset's `files`, if it has any; of very many files, of a subset."""
    files = as_samples(samples).files
    if files is None or not len(files):
        return None
    digest = hashlib.sha256(str(len(files)).encode())
    for index in range(0, len(files), -(-len(files) // MAX_FILES)):
        path = files[index]
        if not isinstance(path, str | os.PathLike):
            return None  # the dataset uses this name for something else
        try:
            size = os.stat(path).st_size
        except OSError:
            size = -1  # a file that only one machine lacks is a difference as well
        # no folder: data.root may differ
        digest.update(os.fsencode(f"{os.path.basename(path)} {size}\n"))
    return short_digest(digest.digest())
