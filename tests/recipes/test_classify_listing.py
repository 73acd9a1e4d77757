"""Class folders and CSV files of users: what is found, and what is refused with its place and a fix."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samebits.errors import DataError
from samebits.recipes.classify.config import Config, DataConfig
from samebits.recipes.classify.data import ImageFiles
from samebits.recipes.classify.listing import read_csv
from samebits.recipes.classify.recipe import build
from samebits.recipes.classify.rows import MAX_CLASSES, list_folder
from tests.recipes.class_folders import found, shapes, touch


def damage(root: Path, *names: str) -> None:
    for name in names:
        (root / name).write_bytes(b"no picture")


def test_a_file_where_a_folder_should_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "flowers.zip").write_bytes(b"PK\3\4\xff")
    with pytest.raises(DataError, match=r"flowers\.zip is a file, not a folder of class folders") as error:
        found(root=tmp_path / "flowers.zip")
    assert "Unpack it" in error.value.slots["fix"]
    assert "data.train=train.csv" in error.value.slots["fix"]
    with pytest.raises(DataError, match=r"flowers\.zip:1 is not UTF-8"):
        found(train=tmp_path / "flowers.zip", eval=tmp_path)


def test_all_of_a_folder_is_trained_on_if_the_validation_set_is_given(tmp_path: Path) -> None:
    train, held_out = shapes(tmp_path / "a"), shapes(tmp_path / "b")
    (held_out / "stars/0001.jpg").unlink()
    known = found(root=train, eval=held_out)
    assert {name: len(files) for name, files in known["train"].items()} == dict.fromkeys(known["classes"], 4)
    assert sum(map(len, known["held_out"].values())) == 19
    assert known["train"] == found(train=train, eval=held_out)["train"]
    assert known["held_out_from"] == str(held_out)


def test_validation_images_that_are_trained_on_too_are_counted(tmp_path: Path) -> None:
    train, held_out = shapes(tmp_path / "a"), shapes(tmp_path / "b")
    (tmp_path / "a.csv").write_text("a/stars/0000.jpg,stars\na/stars/0001.jpg,stars\na/circles/0000.jpg,circles\n")
    (tmp_path / "c.csv").write_text(
        f"b/../a/stars/0001.jpg,stars\n{train}/circles/0000.jpg,circles\nb/stars/0002.jpg,stars\n"
    )
    assert found(root=train)["warnings"] == found(root=train, eval=held_out)["warnings"] == {}
    assert found(train=train, eval=train)["warnings"]["validation"].startswith("warning: 20 of 20 images are")
    lists = {"train": tmp_path / "a.csv", "eval": tmp_path / "c.csv"}
    known = found(**lists)
    parts = build(Config.model_validate({"recipe": "classify", "data": lists}), known)
    assert parts.describe["validation"] == "warning: 2 of 3 images are training images too"
    assert "training" not in parts.describe


def test_a_csv_file_may_have_quotes_and_spaces(tmp_path: Path) -> None:
    touch(tmp_path, "a, b.jpg", "c.jpg")
    (tmp_path / "list.csv").write_text('"a, b.jpg", "wild rose"\r\nc.jpg , tulips \r\n\r\n')
    assert read_csv(tmp_path / "list.csv") == {"tulips": ["c.jpg"], "wild rose": ["a, b.jpg"]}


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_all_lines_of_a_csv_file_are_read_however_they_end(tmp_path: Path, end: str) -> None:
    touch(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "list.csv").write_bytes(end.join(["path,label", "a.jpg,a", "b.jpg,b", ""]).encode("utf-8-sig"))
    assert read_csv(tmp_path / "list.csv") == {"a": ["a.jpg"], "b": ["b.jpg"]}


def test_a_link_to_nowhere_is_called_that(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.jpg")
    (tmp_path / "a/2.jpg").unlink()
    (tmp_path / "a/2.jpg").symlink_to("gone.jpg")
    files = list_folder(tmp_path, "data.root")
    with pytest.raises(DataError, match=r"2\.jpg is missing") as error:
        ImageFiles(tmp_path, files, ["a"], DataConfig(root=tmp_path), train=True)
    assert error.value.slots["cause"] == "it is a link to gone.jpg"


@pytest.mark.parametrize("train", [True, False])
def test_a_damaged_image_stops_the_run_and_the_fix_leaves_it_out(tmp_path: Path, train: bool) -> None:
    damage(shapes(tmp_path), "stars/0001.jpg")
    files = list_folder(tmp_path, "data.root")
    place = [file for name in files for file in files[name]].index("stars/0001.jpg")
    for on_error in ("stop", "skip"):
        config = DataConfig(root=tmp_path, size_px=32, on_error=on_error)
        samples = ImageFiles(tmp_path, files, list(files), config, train=train)
        with pytest.raises(DataError, match=r"0001\.jpg is not an image") as error:
            samples.batch(np.array([place]), np.zeros(1, np.uint64))
        assert ("data.on_error=skip" in str(error.value)) == (on_error == "stop")


def test_a_link_that_leads_back_is_followed_once(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/deep/2.jpg", "b/1.jpg", "elsewhere/3.jpg")
    (tmp_path / "elsewhere").rename(tmp_path / ".elsewhere")
    (tmp_path / "a/self").symlink_to(".")
    (tmp_path / "a/deep/up").symlink_to("..")
    (tmp_path / "a/first").symlink_to("../.elsewhere")
    (tmp_path / "a/second").symlink_to("../.elsewhere")
    assert list_folder(tmp_path, "data.root")["a"] == ["a/1.jpg", "a/deep/2.jpg", "a/first/3.jpg"]


def test_jfif_files_are_pictures(tmp_path: Path) -> None:
    (shapes(tmp_path) / "stars/0001.jpg").rename(tmp_path / "stars/0001.JFIF")
    known = found(root=tmp_path)
    assert "stars/0001.JFIF" in known["train"]["stars"] + known["held_out"]["stars"]
    assert known["skipped"] == {}


def test_damaged_images_are_left_out_before_the_split(tmp_path: Path) -> None:
    held_out = found(root=shapes(tmp_path))["held_out"]["stars"]
    damage(tmp_path, *held_out)
    known = found(root=tmp_path)
    assert list(known["skipped"]) == held_out
    assert (len(known["train"]["stars"]), len(known["held_out"]["stars"])) == (2, 1)


@pytest.mark.parametrize(("num_damaged", "said"), [(3, "only one image of class stars"), (4, "no image of class")])
def test_a_class_with_too_few_whole_pictures_is_named(tmp_path: Path, num_damaged: int, said: str) -> None:
    damage(shapes(tmp_path), *(f"stars/000{place}.jpg" for place in range(num_damaged)))
    with pytest.raises(DataError, match=said) as error:
        found(root=tmp_path)
    assert error.value.slots["where"] == str(tmp_path / "stars/0000.jpg")


def test_a_class_of_the_users_validation_images_may_be_damaged(tmp_path: Path) -> None:
    train, held_out = shapes(tmp_path / "train"), shapes(tmp_path / "eval")
    damage(held_out, *(f"stars/000{place}.jpg" for place in range(4)))
    known = found(train=train, eval=held_out)
    assert len(known["skipped"]) == 4
    assert {name: len(files) for name, files in known["held_out"].items() if files} == dict.fromkeys(
        set(known["classes"]) - {"stars"}, 4
    )
    damage(held_out, *(str(path.relative_to(held_out)) for path in held_out.rglob("*.jpg")))
    with pytest.raises(DataError, match=r"no image of .*eval can be read"):
        found(train=train, eval=held_out)


def test_files_that_are_not_used_are_counted_at_the_start(tmp_path: Path) -> None:
    root = shapes(tmp_path / "a")
    for name in ("stars/IMG_1.HEIC", "stars/IMG_2.HEIC", "circles/@eaDir/0000.jpg/a.jpg", "__MACOSX/stars/0000.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "stars/0000.jpg", root / name)
    known = found(root=root)
    assert "__MACOSX" not in known["classes"]
    parts = build(Config.model_validate({"recipe": "classify", "data": {"root": root}}), known)
    assert parts.describe["left out"] == "2 files .heic"
    for path in (root / "stars").glob("*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match="stars contains no images") as caught:
        found(root=root)
    assert caught.value.slots["given"] == "2 files .heic"


def test_numbers_are_sorted_by_value_except_as_folders_and_the_head_shows_the_order(tmp_path: Path) -> None:
    names = [f"{number}/{image}.jpg" for number in range(12) for image in "ab"]
    touch(tmp_path, *names)
    (tmp_path / "list.csv").write_text("".join(f"{name},{name.split('/')[0]}\n" for name in names))
    by_value = [str(number) for number in range(12)]
    # Sorted as text, as torchvision.datasets.ImageFolder does.
    for root, classes, way in ((tmp_path, sorted(by_value), "as text"), (tmp_path / "list.csv", by_value, "by value")):
        info = found(root=root, on_error="stop")
        assert info["classes"] == classes
        config = Config.model_validate({"recipe": "classify", "data": {"root": root}})
        row = build(config, info).describe["classes"]
        assert row.startswith(", ".join(classes)), row
        assert f"(sorted {way}" in row
    assert found(root=tmp_path, on_error="stop", classes=["2", "10"])["classes"] == ["2", "10"]
    cards = [f"{card}/{image}.jpg" for card in ("2", "10", "ace") for image in "ab"]
    touch(tmp_path / "cards", *cards)
    config = Config.model_validate({"recipe": "classify", "data": {"root": tmp_path / "cards"}})
    row = build(config, found(root=tmp_path / "cards", on_error="stop")).describe["classes"]
    assert row == "2 whole numbers, such as 10, and 1 names, such as ace"


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
