"""Files in a dataset's folders that are not used are counted, and images that are used twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from samebits.data.names import left_out_row, overlap_rows, walk


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_other_files_are_counted_and_folders_of_the_system_are_not_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.PNG", "a/3.HEIC", "a/4.heic", "a/5.avif", "a/Thumbs.db", "a/.DS_Store", "a/._1.jpg")
    touch(tmp_path, "a/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "a/deep/__MACOSX/x.png", "a/deep/6.jpg", "a/README")
    touch(tmp_path, "a/.ipynb_checkpoints/1-checkpoint.jpg", "a/deep/lost+found/text.txt")
    counts: Counter[str] = Counter()
    assert sorted(walk(tmp_path, "a", counts)) == ["a/1.jpg", "a/2.PNG", "a/deep/6.jpg"]
    assert counts == {
        ".heic": 2, ".avif": 1, "._*": 1, "without an ending": 1,
    }  # fmt: skip
    assert walk(tmp_path, "a") == walk(tmp_path, "a", Counter())


def test_the_row_of_files_left_out_begins_with_the_most(tmp_path: Path) -> None:
    assert left_out_row({}) == ""
    assert left_out_row({"in @eaDir": 1, ".heic": 4000}) == "4,000 files .heic, 1 file in @eaDir"
    assert left_out_row({f".{number}": 1 for number in range(9)}).endswith("1 file .5 …")


def test_images_in_both_sets_and_repeated_ones_are_counted() -> None:
    assert overlap_rows(["a", "b"], ["c"]) == {}
    rows = overlap_rows(["a", "b", "b", "b"], ["c", "a"])
    assert rows["validation"] == "warning: 1 of 2 images are training images too"
    assert rows["training"] == "warning: 2 of 4 images are listed again, maybe with another label"
    assert overlap_rows(iter(()), iter(())) == {}
