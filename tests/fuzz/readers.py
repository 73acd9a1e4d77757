"""The process that reads mutated files: each reader of the package on a file of unknown origin, one after another.

Asked on stdin with a line of JSON, `{"kind": ..., "path": ...}`; answers on stdout with one that has the outcome
("read", "refused", or the traceback), the peak of memory in bytes and the processor time in seconds.
"""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.labeled_images import coco, masks, regions

SLACK_BYTES = 3 << 30  # beyond this the process gets no memory, so that a fault does not take the machine's


def picture(path: Path) -> None:
    from samebits.data.images import EncodedImage, read_rgb
    from samebits.errors import DataError
    from samebits.recipes.mnist.data import SCALES
    from samebits.recipes.mnist.predict import read_image

    read_rgb(path)
    found = EncodedImage(path)
    found.pixels(2 if found.is_scalable else 1)
    try:
        read_image(path, SCALES["mnist"])
    except DataError as error:
        if "shows nothing" not in error.what:
            raise


def idx(path: Path) -> None:
    from samebits.recipes.mnist.data import read_idx

    read_idx(path, num_dims=3)


def labels(path: Path) -> None:
    import numpy as np

    from samebits.recipes.text.alphabet import Alphabet, text_of
    from samebits.recipes.text.config import Config
    from samebits.recipes.text.files import choose
    from samebits.recipes.text.labels import read_labels

    chars = path.parent / "chars.txt"
    data: dict[str, Any] = {"train": str(path), "eval": str(path), "on_unknown": "skip", "on_too_long": "skip"}
    if chars.is_file():
        data["chars"] = chars
    config = Config.model_validate({"recipe": "text", "data": data})
    found = read_labels(path, config.data, config.data.chars)
    chosen = choose(config, Alphabet(text_of(np.unique(found.codes))), train=True)
    for place in range(min(3, len(chosen.rows))):
        chosen.image(place)


def alphabet(path: Path) -> None:
    from samebits.recipes.text.alphabet import read_alphabet, read_chars

    read_chars(path)
    read_alphabet(path)


def csv(path: Path) -> None:
    from samebits.recipes.classify.listing import read_csv

    read_csv(path)


def packed(path: Path) -> None:
    """An LMDB set, one of whose entries is the file: that of its name."""
    import lmdb

    from samebits.recipes.text import labels as packed_lmdb
    from samebits.recipes.text.images import gray, open_packed

    folder = path.parent / "set"
    shutil.rmtree(folder, ignore_errors=True)
    with lmdb.open(str(folder), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for name in ("num-samples", "image-000000001", "label-000000001"):
            transaction.put(name.encode(), (path.parent / name).read_bytes())
    try:
        for number, _ in enumerate(packed_lmdb.read_texts(folder), start=1):
            gray(open_packed(folder, number))
    finally:
        packed_lmdb._close_all()


def yaml(path: Path) -> None:
    from samebits.config.document import parse_value, read

    read(path, path.name)
    parse_value(path.read_text())


def checkpoint(path: Path) -> None:
    """A file of a checkpoint, with a manifest that was made for it."""
    from samebits.storage.checkpoint import load_checkpoint
    from samebits.storage.manifest import MANIFEST, manifest_of

    folder = path.parent
    if path.name != MANIFEST:
        content = path.read_bytes()
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    manifest_of(folder)
    load_checkpoint(folder)


def weights(path: Path) -> None:
    import torch
    from torch import nn

    from samebits.storage.pretrained import load_pretrained, read_state

    read_state(path)
    torch.manual_seed(0)
    load_pretrained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), path)


def run_json(path: Path) -> None:
    from samebits.storage.run_folder import RunFolder

    RunFolder(path.parent).read_json(path.name)


def records(path: Path) -> None:
    from samebits.report.records import MetricsLog, read_records

    read_records(path.parent)
    MetricsLog(path.parent, tensorboard=False).truncate_after(3)


def store_key(path: Path) -> None:
    """A value in a store, under the key of the file's name, read by all that read such a key; none of it is signed."""
    from torch.distributed import HashStore

    from samebits.cluster import collectives, connecting, rendezvous
    from samebits.cluster import store as generations
    from samebits.cluster.signed import Seal, SignedStore, error_from_store, read_as
    from samebits.launch.nodes import rendezvous as admission
    from samebits.launch.nodes import rendezvous as waiting
    from samebits.process_range import ProcessRange, RendezvousConfig
    from samebits.scratch import is_running
    from samebits.watchdog import detector

    raw, name = HashStore(), path.name
    raw.set(name, path.read_bytes() or b" ")  # type: ignore[arg-type]  # bytes are taken too
    store = SignedStore(raw, Seal())
    run = RendezvousConfig(ProcessRange(2, 2), "127.0.0.1:1", "run", 1.0, 1.0, 10.0, path)
    value = store.get(name)
    if (info := rendezvous._rank_info(value)) is not None:
        is_running(info.pid)
        str(info)
    rendezvous._rank_infos(value, 2)
    str(error_from_store(value))
    str(connecting.from_json(value)[0])
    if (beat := read_as(detector.Heartbeat, value)) is not None:
        sign = detector.RankStatus(0, "h", 1, beat.doing, beat.waits, beat.step, beat.stalled_s, silent_s=1.0)
        str(detector.explain(detector.find_stalled_ranks([sign], 0.0) or [sign], 2, 5.0, "stacks"))
    if detector._is_verdict(value, 2):
        str(detector.explain([detector.RankStatus(**sign) for sign in value["culprits"]], 2, 5.0, "stacks"))
    generations.generation_of(value, 1)
    collectives._count(raw, name)
    store.count(name)
    if (record := admission.read_record(raw.get(name))) is not None:
        admission.compare(record, admission.describe_run(run), has_own_id=False)
    raw.set(waiting.REFUSED, path.read_bytes() or b" ")  # type: ignore[arg-type]  # bytes are taken too
    waiting.read_refusal(raw)


def message(path: Path) -> None:
    """What a rank has sent through the process group."""
    from samebits.cluster import collectives

    with contextlib.suppress(collectives.MessageError):  # `collect` makes an error for users of it
        collectives.decode(path.read_bytes())


def verified(path: Path) -> None:
    """What a stranger publishes to have a run verified: its record of steps and its statement."""
    from samebits.provenance.record import StepWriter, read_statement_and_files, read_steps

    if path.name == "steps.bin":
        try:
            log = read_steps(path)
            _ = log.link(), log.skipped(), log.get(log.first_step)
        finally:
            StepWriter(path, 3, bytes(32)).close()
    else:
        _ = read_statement_and_files(path)[0].root


READERS: dict[str, Callable[[Path], None]] = {
    reader.__name__: reader
    for reader in (
        picture, idx, labels, alphabet, csv, coco, masks, regions, packed, yaml, checkpoint, weights, run_json,
        records, store_key, message, verified,
    )
}  # fmt: skip


def try_reader(kind: str, path: Path) -> dict[str, Any]:
    """What a reader makes of a file."""
    from samebits.errors import SamebitsError

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
    start, outcome = time.process_time(), "read"
    try:
        READERS[kind](path)
    except SamebitsError as error:
        outcome = "refused"
        try:
            str(error).encode()
        except UnicodeEncodeError:
            outcome = f"the error can't be printed: {error!r}"
    except BaseException:
        outcome = traceback.format_exc()
    return {"outcome": outcome, "peak_bytes": _peak_bytes(), "seconds": time.process_time() - start}


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Read until stdin ends."""
    import torch

    from samebits.recipes.classify import listing
    from samebits.recipes.mnist import predict as mnist_picture
    from samebits.recipes.pose import coco_files
    from samebits.recipes.segment import data
    from samebits.recipes.text import files
    from samebits.storage import pretrained

    # Imported now, not within the first file.
    assert all((pretrained, listing, mnist_picture, coco_files, data, files))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "r+b") as nowhere:  # some libraries print what they think of a file
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SLACK_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(try_reader(asked["kind"], Path(asked["path"]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
