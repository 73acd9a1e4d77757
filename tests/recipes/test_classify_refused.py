"""Class folders and CSV files that are damaged, or mean something else: each refused with its place and a fix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import DataError
from samebits.recipes.classify.rows import MAX_CLASSES
from tests.recipes.class_folders import found, touch

FILES = [f"{kind}{number}.jpg" for kind in "ab" for number in range(3)]
LINES = [f"{name},{name[0]}" for name in FILES]


@dataclass(frozen=True)
class Refused:
    """What a folder has, the error that it gives, and the classes with which it is accepted."""

    what: str  #: A pattern.
    files: Sequence[str] = tuple(FILES)
    csv: Sequence[str] | bytes | None = None  #: The content of list.csv, which is data.root then; or its lines.
    slots: tuple[tuple[str, str], ...] = ()  #: A slot, and a part of its text; {root} is the folder.
    classes: Sequence[str] = ()  #: data.classes, with which it is no error; none: always one.
    links: tuple[tuple[str, str], ...] = ()  #: Names of symbolic links, and where they point to.

    def prepare(self, root: Path) -> Path:
        touch(root, *self.files)
        for name, target in self.links:
            (root / name).symlink_to(target)
        if self.csv is None:
            return root
        text = self.csv if isinstance(self.csv, bytes) else ("\n".join(self.csv) + "\n").encode()
        (root / "list.csv").write_bytes(text)
        return root / "list.csv"


def folders(*names: str, inside: str = "{}.jpg") -> list[str]:
    return [f"{name}/{inside.format(number)}" for name in names for number in range(3)]


CASES: dict[str, Refused] = {}
# Parts of a dataset in place of classes.
for parts in (
    ("training_set", "test_set"), ("seg_train", "seg_test", "seg_pred"), ("fold_1", "fold_2", "fold_3"),
    ("Train Images", "Val Images"), ("split0", "split1"), ("test", "train"), ("test", "train", "val"),
    ("Training", "Eval"), ("train", "validation", "valid"), ("val", "test"), ("train",), ("dev", "holdout"),
):  # fmt: skip
    chosen = {
        ("test", "train"): "train={root}/train data.eval={root}/test",
        ("test", "train", "val"): "train={root}/train data.eval={root}/val",
        ("Training", "Eval"): "train={root}/Training data.eval={root}/Eval",
        ("train", "validation", "valid"): "train={root}/train data.eval={root}/valid",
        ("val", "test"): "root to one of these folders, such as {root}/test.",
        ("train",): "root to one of these folders, such as {root}/train.",
        ("training_set", "test_set"): "train={root}/training_set data.eval={root}/test_set",
        ("seg_train", "seg_test", "seg_pred"): "train={root}/seg_train data.eval={root}/seg_test",
        ("Train Images", "Val Images"): "train={root}/Train Images data.eval={root}/Val Images",
    }.get(parts, "root to one of these folders")
    CASES[f"parts {' '.join(parts)}"] = Refused(
        "look like a split, not like classes",
        [f"{part}/{kind}/{number}.jpg" for part in parts for kind in "ab" for number in range(3)],
        slots=(("fix", f"Set data.{chosen}"), ("fix", "\nIf they are classes, set data.classes to their list.")),
        classes=parts if len(parts) > 1 else (),
    )
# A test set without classes cannot be evaluated on, as in most competitions.
for part, flat, setting in (
    (["train"], ["test"], "root to one of these folders, such as {root}/train."),
    (["train", "val"], ["test"], "train={root}/train data.eval={root}/val"),
    (["test", "train"], ["val"], "train={root}/train data.eval={root}/test"),
):
    CASES[f"parts {part} beside {flat}"] = Refused(
        "look like a split, not like classes",
        [*(name for each in part for name in folders(f"{each}/a", f"{each}/b")), *folders(*flat)],
        slots=(("fix", f"Set data.{setting}"),), classes=[*part, *flat],
    )  # fmt: skip
for parts in (("train", "test"), ("training", "validation"), ("fold1", "fold2")):
    CASES[f"parts in classes {parts}"] = Refused(
        r"each class folder in .* has a split of its own",
        [name for part in parts for name in folders("cat", "dog", inside=f"{part}/{{}}.jpg")],
        classes=["cat", "dog"],
    )
# A column of a CSV file that means something else.
for join in ("|", "; ", ",", " ", " + ", "/", " & "):
    CASES[f"labels joined by {join!r}"] = Refused(
        "looks like several labels of an image", [*FILES, "c.jpg", "d.jpg"],
        [*LINES, f'c.jpg,"a{join}b"', f'd.jpg,"b{join}a"'], (("given", "2 such classes, with 2 images"),), ["a", "b"],
    )  # fmt: skip
for low, high in (("0.0", "1.0"), ("2.0", "10.0"), ("1.00", "2.00"), ("3.000", "4.0")):
    CASES[f"numbers {low} {high}"] = Refused(
        "are numbers with a point", csv=[f"{name},{low if name[0] == 'a' else high}" for name in FILES]
    )
for header in ([], ["label,path"], ["dx,image"]):
    CASES[f"the other order {header}"] = Refused(
        "has the image in its second column", csv=[*header, *(f"{name[0]},{name}" for name in FILES)],
        slots=(("fix", "Write the path first"),),
    )  # fmt: skip
for mark in ("-1", "nan", "NULL"):
    labels = [mark, "x", "y"] * 2
    CASES[f"the mark {mark}"] = Refused(
        rf"class {mark} in .* looks like the mark of images without a class",
        csv=[f"{name},{label}" for name, label in zip(FILES, labels, strict=True)],
        slots=(("given", "2 images"),), classes=["y", mark],
    )  # fmt: skip
    CASES[f"the mark {mark}, left out"] = Refused(CASES[f"the mark {mark}"].what, csv=CASES[f"the mark {mark}"].csv,
                                                  classes=["x", "y"])  # fmt: skip
CASES |= {
    "an id of two images": Refused(
        "a1 may be several images", [*FILES, "a1.png"], [line.replace(".jpg", "") for line in LINES]
    ),
    "a missing first image": Refused(r"list\.csv:1 names a missing image", csv=["gone,a", *LINES]),
    "semicolons": Refused(r"list\.csv:1 ", csv=["a0.jpg;a", *LINES], slots=(("allowed", "path,label"),)),
    "tabs": Refused(r"list\.csv:1 ", csv=["a0.jpg\ta", *LINES], slots=(("allowed", "path,label"),)),
    "three columns": Refused(r"list\.csv:1 ", csv=["path,label,split", *LINES], slots=(("allowed", "path,label"),)),
    "another encoding": Refused(
        r"list\.csv:1 is not UTF-8", csv="a0.jpg,Gänseblümchen\nb0.jpg,Rosen\n".encode("cp1252"),
        slots=(("given", "byte 0xE4, byte 9 of line 1"), ("fix", "Save the file as UTF-8, from the encoding"),
               ("cause", "as cp1252, the line reads: a0.jpg,Gänseblümchen")),
    ),
    "a class of two lines in a CSV file": Refused(
        r"invisible character: 'b\\nc'", ["a/1.jpg", "a/2\n3.jpg"], ["a/1.jpg,a", '"a/2\n3.jpg","b\nc"'],
    ),
    "a class folder of two lines": Refused(r"invisible character: 'b\\nc'", ["a/1.jpg", "b\nc/1.jpg", "a/2\n3.jpg"]),
    "many classes": Refused(
        f"{MAX_CLASSES + 1:,} classes", csv=[f"a0.jpg,{number}" for number in range(MAX_CLASSES + 1)],
    ),
    "a file name in another encoding": Refused(
        r"is not UTF-8: a/caf\\xe9\.jpg\n", ["a/1.jpg", "b/1.jpg", os.fsdecode(b"a/caf\xe9.jpg")],
        slots=(("fix", "Rename it."),),
    ),
    "a folder name in another encoding": Refused(
        r"is not UTF-8: b\\xff\n", ["a/1.jpg", "b/1.jpg", os.fsdecode(b"b\xff/1.jpg")], slots=(("fix", "Rename it."),),
    ),
    "a link to the disk": Refused("points to /", ["a/1.jpg", "b/1.jpg"], links=(("a/all", "/"),)),
    "a link to the system": Refused("points to /", ["a/1.jpg", "b/1.jpg"], links=(("a/all", "/proc"),)),
}  # fmt: skip
for name in ("tulips\u200b", "tul\xadips", "\ufefftulips", "tulips\x00", "tulips\u2060"):
    CASES[f"invisible in {name!a}"] = Refused(
        "invisible character|is not UTF-8", csv=["path,label", "a0.jpg,tulips", f"b0.jpg,{name}"]
    )
for one, other in (("é", "e\u0301"), ("red rose", "red\xa0rose"), ("7", "07"), ("red rose", "red  rose")):
    shown = (("given", f"{one!a} and {other!a}"),)
    CASES[f"alike {one!a} {other!a}"] = Refused("look the same", csv=[f"a0.jpg,{one}", f"b0.jpg,{other}"], slots=shown)
    CASES[f"alike folders {one!a} {other!a}"] = Refused("look the same", folders(one, other))


def listed(root: Path, **data: Any) -> dict[str, Any]:
    return found(root=root, on_error="stop", **data)


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_set_of_classes_is_refused(case: str, tmp_path: Path) -> None:
    refused = CASES[case]
    root = refused.prepare(tmp_path)
    with pytest.raises(DataError, match=refused.what) as caught:
        listed(root)
    for slot, text in refused.slots:
        assert text.format(root=tmp_path) in caught.value.slots[slot]
    assert caught.value.slots["fix"]
    if refused.classes:
        assert sorted(listed(root, classes=list(refused.classes))["classes"]) == sorted(refused.classes)
