"""Small valid files of every kind that the package reads, from which mutated ones are made."""

import gzip
import io
import json
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from samebits.provenance.record import FIRST_LINK, Evaluation, RunStatement, make_statement

# Of formats that are not in the list: refused by their content, whatever they are called.
REFUSED = ("f.jpg", "g.jpg", "h.jpg", "i.jpg", "gbk.txt")


@dataclass(frozen=True)
class Seed:
    """A valid file.

    Attributes:
        kind: Which reader reads it.
        name: The file's name.
        content: What is mutated.
        beside: Other files in its folder, which are not.
    """

    kind: str
    name: str
    content: bytes
    beside: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path, content: bytes) -> Path:
        for name, other in {**self.beside, self.name: content}.items():
            (folder / name).write_bytes(other)
        return folder / self.name


def image(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(form: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    image(mode).save(file, form, **options)
    return file.getvalue()


def encoded16() -> bytes:
    """A PNG of 16 bits that uses all of them: 12-bit values are refused."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(image("L")).astype(np.uint16) * 257).save(file, "PNG")
    return file.getvalue()


def pictures() -> list[Seed]:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "a.jpg": encoded("JPEG"), "b.jpg": encoded("JPEG", progressive=True), "c.jpg": encoded("JPEG", exif=exif),
        "d.jpg": encoded("JPEG", "CMYK"), "e.jpg": encoded("MPO", save_all=True, append_images=[image()]),
        "a.png": encoded("PNG", "RGBA"), "b.png": encoded("PNG", "P", exif=exif), "c.png": encoded16(),
        "a.webp": encoded("WEBP", "RGBA", lossless=True), "b.webp": encoded("WEBP"), "a.bmp": encoded("BMP"),
        "b.bmp": encoded("BMP", "P"), "a.gif": encoded("GIF", "P", save_all=True, append_images=[image("P")]),
        "a.tif": encoded("TIFF"), "b.tif": encoded("TIFF", compression="tiff_lzw"),
        "c.tif": encoded("TIFF", "F", compression="tiff_deflate"), "d.tif": encoded("TIFF", compression="jpeg"),
        "e.tif": encoded("TIFF", "1", compression="group4"), "a.ppm": encoded("PPM"),
        "b.ppm": b"P3 2 1 255 1 2 3 4 5 6",
        "f.jpg": encoded("EPS"), "g.jpg": encoded("ICO"), "h.jpg": encoded("DDS"), "i.jpg": encoded("TGA"),
    }  # fmt: skip
    return [Seed("picture", name, content) for name, content in files.items()]


def idx_files() -> list[Seed]:
    content = struct.pack(">4B3I", 0, 0, 8, 3, 2, 28, 28) + bytes(2 * 28 * 28)
    packed = {"images": content, "images.gz": gzip.compress(content)}
    return [Seed("idx", name, each) for name, each in packed.items()]


def text_files() -> list[Seed]:
    beside = {"a.jpg": encoded("JPEG"), "b.jpg": encoded("JPEG")}
    lines = {"labels.tsv": "a.jpg\tabc\nb.jpg\tde f\n", "labels.txt": "a.jpg abc\nb.jpg 中文\n"}
    seeds = [Seed("labels", name, text.encode(), beside) for name, text in lines.items()]
    seeds.append(Seed("labels", "gbk.txt", lines["labels.txt"].encode("gbk"), beside))
    chars = b"blank\na\nb\nc\n"
    seeds.append(Seed("labels", "index.txt", b"a.jpg 1 2 3\nb.jpg 3 2 1\n", {**beside, "chars.txt": chars}))
    seeds.append(Seed("alphabet", "chars.txt", "a\nb\n中\n".encode()))
    seeds.append(Seed("csv", "list.csv", b"path,label\na.jpg,x\nb.jpg,y\n", beside))
    return seeds


def annotations() -> bytes:
    from samebits.recipes.pose.skeletons import SKELETONS

    joints = SKELETONS["coco"].joints
    person = {
        "id": 1, "image_id": 7, "category_id": 1, "keypoints": [4, 5, 2] * len(joints), "num_keypoints": len(joints),
        "bbox": [1, 2, 5.5, 6], "area": 30, "iscrowd": 0, "segmentation": [[1, 1, 6, 1, 6, 7]],
    }  # fmt: skip
    crowd = {"num_keypoints": 0, "keypoints": [0, 0, 0] * len(joints), "iscrowd": 1}
    runs = [
        {"size": [10, 12], "counts": [20, 30, 70]},
        {"size": [10, 12], "counts": "P13700000`1"},
        None,
        [[1, 1, 9, 1, 9, 9]],
    ]
    people = [person, *({**person, **crowd, "id": 2 + at, "segmentation": each} for at, each in enumerate(runs))]
    return json.dumps(
        {
            "images": [{"id": 7, "file_name": "a.jpg", "width": 12, "height": 10}],
            "annotations": people,
            "categories": [{"id": 1, "name": "person", "keypoints": list(joints)}],
        }
    ).encode()


def labeled_images() -> list[Seed]:
    """Masks, and regions of categories, with the images beside them."""
    beside = {"image.jpg": encoded("JPEG")}
    values = np.arange(120, dtype=np.uint16).reshape(10, 12) // 40
    gray = Image.fromarray(values.astype(np.uint8))
    palette = gray.convert("P")
    files = {"a.png": (gray, {}), "b.png": (Image.fromarray(values), {}), "c.png": (palette, {}), "a.bmp": (gray, {}),
             "a.gif": (palette, {}), "a.tif": (Image.fromarray(values), {"compression": "tiff_lzw"})}  # fmt: skip
    seeds = []
    for name, (mask, options) in files.items():
        file = io.BytesIO()
        mask.save(file, {"tif": "TIFF"}.get(name[2:], name[2:].upper()), **options)
        seeds.append(Seed("masks", name, file.getvalue(), beside))
    content = json.loads(annotations())
    content["images"].append({**content["images"][0], "id": 8, "file_name": "b.jpg"})
    content["categories"].append({"id": 2, "name": "cat"})
    other = {"image_id": 8, "category_id": 2, "segmentation": [[0, 0, 4, 0, 4, 5], [6, 6, 9, 6, 9, 9]]}
    content["annotations"] = [each for each in content["annotations"] if each["segmentation"]]
    content["annotations"].append({**content["annotations"][0], **other, "id": 99})
    both = {"a.jpg": encoded("JPEG"), "b.jpg": encoded("JPEG")}
    return [*seeds, Seed("regions", "regions.json", json.dumps(content).encode(), both)]


def packed_entries() -> list[Seed]:
    entries = {"num-samples": b"1", "image-000000001": encoded("PNG"), "label-000000001": "a中".encode()}
    return [Seed("packed", name, content, entries) for name, content in entries.items()]


YAML = b"""# a run
recipe: mnist
epochs: 3
optim: &o {name: sgd, lr: 1e-3, betas: [0.9, 0.99]}
data:
  root: "~/data"
  classes: [a, 'b', *o]
note: |
  two
  lines
"""


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).state_dict())


def weights_files() -> list[Seed]:
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": state(), "epoch": 3, "name": "x"}, new)
    torch.save(state(), old, _use_new_zipfile_serialization=False)
    return [
        Seed("weights", "new.pth", new.getvalue()),
        Seed("weights", "old.pth", old.getvalue()),
        Seed("weights", "w.safetensors", save(state())),
    ]


def checkpoint_files() -> list[Seed]:
    import tempfile

    from samebits.storage.checkpoint import Checkpoint
    from samebits.storage.checkpoint import save as save_checkpoint

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoint(3, dict(model.state_dict()), optimizer.state_dict(), {"seed": 1, "loss": 0.5})
        path = save_checkpoint(kept, Path(folder))
        files = {file.name: file.read_bytes() for file in path.iterdir()}
    return [Seed("checkpoint", name, content, files) for name, content in sorted(files.items())]


def store_values() -> list[Seed]:
    """What processes leave for each other in a store, by key; as in a world without a key."""
    from dataclasses import asdict

    from samebits.cluster.rendezvous import RankInfo
    from samebits.cluster.signed import Seal
    from samebits.watchdog.detector import RankStatus

    cards = [asdict(RankInfo(rank, 2, "host", 7, "cpu", "auto", 0, nonce="n", network="x")) for rank in (0, 1)]
    sign = {"doing": "x", "waits": False, "step": 3, "stalled_s": 2.5}
    signed = {
        "card": cards[0], "roll": cards, "fault": {"what": "it failed", "slots": {"where": "here", "fix": "that"}},
        "verdict": {"by": 1, "culprits": [asdict(RankStatus(0, "host", 7, **sign))]},  # type: ignore[arg-type]  # of all types
        "connect verdict": {"what": "lost rank 1", "facts": {"likely": "x"}, "num_lost": 1},
        "watch": {**sign, "beat": 1.5, "work_s": 2.5, "num_steps": 3, "num_micro_batches": 6},
        "invitation": [1, 2],
    }  # fmt: skip
    record = {"run": "run", "host": "h", "pid": 7, "user": "u", "folder": "/x", "inode": 5, "shared": {"torch": "2"}}
    plain = {"owner": record, "came": 2}
    return [
        *(Seed("store_key", name, Seal().write(name, value).encode()) for name, value in signed.items()),
        *(Seed("store_key", name, json.dumps(value).encode()) for name, value in plain.items()),
    ]


def messages() -> list[Seed]:
    from samebits.cluster import collectives
    from samebits.errors import LaunchError

    values = [torch.ones(2, 3), np.arange(6).reshape(2, 3), np.float32(1.5), (1, {2}, b"x", Path("a"), {1: None})]
    content = collectives.encode([*values, torch.float16, torch.Size([1]), LaunchError("x", fix="y"), {"a": 1.5}])
    return [Seed("message", "message", content)]


@cache
def verified_files() -> list[Seed]:
    """A run's record of steps and its statement."""
    links = FIRST_LINK + struct.pack("<Qddd", 0, 2.5, 1.0, 0.1) + bytes(40)
    record = RunStatement(
        {"epochs": 1}, "c" * 64, 1, [{"code": "a"}], [{"torch": "2"}], {"sample": "b"}, "d" * 64,
        [Evaluation(1, {"top1": 0.5, "loss": None})], {"step-000001": {"weights.safetensors": "e" * 64}}, "f" * 64,
    )  # fmt: skip
    statement = make_statement(record, {"steps.bin": "a" * 64}, "run", 0.0, 1.0)
    return [
        Seed("verified", "steps.bin", b"samebits steps 1" + bytes(8) + links),
        Seed("verified", "provenance.json", json.dumps(statement).encode()),
    ]


def all_seeds() -> tuple[Seed, ...]:
    """Seeds of every kind."""
    facts = {"classes": ["a", "b"], "train": {"a": ["1.jpg"]}, "value": 1.5, "none": None}
    lines = "".join(json.dumps({"kind": "step", "step": at, "epoch": 0.5, "loss": 1.25}) + "\n" for at in range(5))
    return (
        *pictures(), *idx_files(), *text_files(), Seed("coco", "a.json", annotations()),
        *labeled_images(), *packed_entries(), Seed("yaml", "a.yaml", YAML),
        *weights_files(), *checkpoint_files(), Seed("run_json", "dataset_info.json", json.dumps(facts).encode()),
        Seed("records", "metrics.jsonl", lines.encode()), *store_values(), *messages(),
        *verified_files(),
    )  # fmt: skip
