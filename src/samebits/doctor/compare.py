"""Compare software, hardware, settings and data over all ranks, and name the ranks that differ."""

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from samebits.cluster import collectives
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.world import World
from samebits.config.given import flat
from samebits.config.marks import Mark
from samebits.config.schema import RunConfig, marks_of
from samebits.data.digests import digest_of
from samebits.data.keyed import keys
from samebits.data.samples import SampleSource
from samebits.doctor.check_result import CheckResult
from samebits.provenance.environment import cpu_name, device_name, version_of
from samebits.provenance.fingerprint import PACKAGE, code_digests
from samebits.version import __version__

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "safetensors")
# Largest difference of clocks without a warning. It does not affect training, but makes logs hard to compare.
CLOCK_S = 2.0
FIXES = {
    "code": "Install the same samebits on all machines.",
    "settings": "Give all ranks the same command.",
    "data": "Compare the data folders, or copy one over the other.",
    "processor": "Use machines of one kind or kernels=portable for equal bits; mode=fast works as it is.",
    "device": "Use machines of one kind for equal bits; mode=fast works as it is.",
}


def summary(world: World, config: RunConfig | None, data: Sequence[SampleSource]) -> dict[str, str]:
    """Describe this rank's software, hardware, settings and data by name, to be compared over the ranks.

    Args:
        world, config: The world and the settings; None if `doctor` runs without a recipe.
        data: The datasets, training set first; empty without a recipe.
    """
    found = {
        "samebits": __version__,
        "code": code_digests("")[PACKAGE],
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in PACKAGES},
        "processor": cpu_name(),
        "device": device_name(world.device),
    }
    if config is not None:
        every = flat(config.model_dump(mode="json"))
        settings = {name: value for name, value in every.items() if Mark.MACHINE not in marks_of(name)}
        found["settings"] = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    if data:
        found["data"] = ", ".join(fingerprint(samples) for samples in data)
    return found


def examine(world: World, own: Mapping[str, str]) -> list[CheckResult]:
    """Compare the summaries of all ranks. Returns the same list on every rank."""
    gathered = collectives.all_gather_object(world, (world.host, dict(own)))
    hosts = [host for host, _ in gathered]
    names = dict.fromkeys(name for _, texts in gathered for name in texts)
    findings = [compared(name, [texts.get(name, "none") for _, texts in gathered], hosts) for name in names]
    # So that all ranks take the time at nearly the same moment.
    collectives.barrier(world, 60)
    times = collectives.all_gather_object(world, time.time())
    apart = max(times) - min(times)
    clocks = CheckResult("clocks", f"at most {apart:.2f} s apart")
    if apart > CLOCK_S:
        text = f"{clocks.value}: rank {times.index(max(times))} is ahead"
        clocks = CheckResult("clocks", text, "warning", "Set the time: timedatectl set-ntp true")
    return [*findings, clocks]


def compared(name: str, values: Sequence[str], hosts: Sequence[str]) -> CheckResult:
    """Compare one value over all ranks, and name the ranks that differ from the most common value.

    Args:
        name: Name of the value, such as "torch".
    """
    (usual, _), *others = Counter(values).most_common()
    if not others:
        return CheckResult(name, f"{usual} on all {len(values)}")
    odd = [rank for rank, value in enumerate(values) if value != usual]
    shown = [f"{values[rank]} on rank {rank} ({hosts[rank]})" for rank in odd[:4]]
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    same = [rank for rank, value in enumerate(values) if value == usual]
    text = f"{usual} on {ranks_text(same)}; {', '.join(shown)}{more}"
    fix = FIXES.get(name) or f"pip install {name}=={usual} on {', '.join(sorted({hosts[rank] for rank in odd}))}"
    if name == "python":
        fix = f"Use Python {usual} on all machines."
    return CheckResult(name, text, "warning" if name in ("processor", "device", "python", "pillow") else "problem", fix)


def fingerprint(samples: SampleSource) -> str:
    """Return the number of samples, and a hash of the first, the middle and the last as training reads them."""
    count = len(samples)
    if count == 0:
        return "0 samples"
    indices = np.unique(np.array([0, count // 2, count - 1]))
    batch = samples.batch(indices, keys(0, 0, indices))
    return f"{count:,} samples {digest_of(batch).hex()[:12]}"
