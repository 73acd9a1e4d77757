"""Damaged and hostile shards and Parquet files end in an error with a fix, within bounded memory."""

import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samebits.data.sources import parquet_rows
from samebits.data.sources.parquet_rows import ParquetRows
from samebits.data.sources.tar_shards import BLOCK, TarShards
from samebits.errors import DataError
from tests.unit.data.sources.source_files import to_json, write_tar

MANY_BYTES = 1 << 26
# pyarrow's buffers do not keep their pool alive, and the traceback of an error may keep buffers.
USUAL = pyarrow.default_memory_pool()
COUNTED = pyarrow.proxy_memory_pool(USUAL)


def whole_tar(form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(5))
    members = [("a.cls", b"1"), ("a.npy", file.getvalue()), ("a.json", to_json([1, "x"]))]
    members += [(f"{'long/' * 40}b.cls", b"2"), ("c.txt", b"text" * 300)]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=form) as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def whole_parquet() -> bytes:
    table = pyarrow.table(
        {"x": list(range(40)), "name": [f"n{i % 3}" for i in range(40)], "l": [[i, None] for i in range(40)]}
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=9)
    return file.getvalue()


def read_tar(path: Path) -> list[object]:
    shards = TarShards(path, index_dir=path.parent)
    return [shards[index] for index in range(len(shards))]


def read_parquet(path: Path) -> list[object]:
    rows = ParquetRows(path)
    return [rows[index] for index in range(len(rows))]


def read_or_refuse(reader: Callable[[Path], list[object]], path: Path, content: bytes) -> str:
    """Read all samples of a file as text. Empty: it was refused, with something to do."""
    path.write_bytes(content)
    tracemalloc.start()
    pyarrow.set_memory_pool(COUNTED)
    try:
        return repr(reader(path))
    except DataError as refusal:
        error = refusal
    finally:
        pyarrow.set_memory_pool(USUAL)
        assert tracemalloc.get_traced_memory()[1] < MANY_BYTES
        assert COUNTED.max_memory() < MANY_BYTES
        tracemalloc.stop()
    assert path.name in str(error)
    assert error.slots["fix"].endswith(".")
    return ""


TAR = {form: whole_tar(form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)}
PARQUET = whole_parquet()
flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4)


def flipped(content: bytes, changes: list[tuple[float, int]]) -> bytes:
    damaged = bytearray(content)
    for place, mask in changes:
        damaged[int(place * len(content))] ^= mask
    return bytes(damaged)


@settings(max_examples=150)
@given(form=st.sampled_from(list(TAR)), changes=flips)
def test_a_tar_shard_with_changed_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, form: int, changes: list[tuple[float, int]]
) -> None:
    read_or_refuse(read_tar, tmp_path_factory.mktemp("t") / "x.tar", flipped(TAR[form], changes))


@settings(max_examples=150)
@given(changes=flips)
def test_a_parquet_file_with_changed_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]]
) -> None:
    read_or_refuse(read_parquet, tmp_path_factory.mktemp("p") / "x.parquet", flipped(PARQUET, changes))


@settings(max_examples=60)
@given(form=st.sampled_from(list(TAR)), share=st.floats(0, 1, exclude_max=True))
@example(form=tarfile.PAX_FORMAT, share=0.0)
def test_a_tar_shard_that_is_cut_off_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, form: int, share: float
) -> None:
    path = tmp_path_factory.mktemp("t") / "x.tar"
    with_end = len(TAR[form].rstrip(b"\0"))
    end = -(-with_end // BLOCK) * BLOCK  # the last file's padding; one block of zeros is an end mark already
    assert read_or_refuse(read_tar, path, TAR[form][: int(share * (end + BLOCK))]) == ""
    assert read_or_refuse(read_tar, path, TAR[form][: end + BLOCK]) == read_or_refuse(read_tar, path, TAR[form])


@settings(max_examples=40)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_parquet_file_that_is_cut_off_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    assert read_or_refuse(read_parquet, path, PARQUET[: int(share * len(PARQUET))]) == ""
    assert read_or_refuse(read_parquet, path, PARQUET)


def one_entry(name: str = "a.cls", size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.linkname = size, kind, link
    return entry.tobuf(tarfile.GNU_FORMAT)


def pax(record: bytes) -> bytes:
    return one_entry(kind=tarfile.XHDTYPE, size=BLOCK) + record.ljust(BLOCK, b"\0")


END = bytes(2 * BLOCK)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (one_entry(size=1 << 40) + END, "the header claims 1,099,511,627,776 bytes"),
        (one_entry(kind=tarfile.XHDTYPE, size=1 << 40) + END, "extended header of 1,099,511,627,776"),
        (one_entry(kind=tarfile.GNUTYPE_LONGNAME, size=1 << 21) + bytes(1 << 21) + END, "extended header of 2,097,152"),
        (pax(b"-5 size=1\n") + END, "is damaged"),
        (
            pax(b"11 size=-1\n") + one_entry() + END,
            "claims -1 bytes",
        ),
        (pax(b"0 size=1\n") + END, "is damaged"),
        (
            pax(b"17 size=99999999\n") + one_entry() + END,
            "the header claims 99,999,999 bytes",
        ),
        (
            one_entry(kind=tarfile.XHDTYPE, size=BLOCK)
            + b"22 GNU.sparse.map=0,1\n".ljust(BLOCK, b"\0")
            + one_entry()
            + END,
            "a sparse file",
        ),
        (one_entry(kind=tarfile.GNUTYPE_SPARSE) + END, "a sparse file"),
        (one_entry("../a.cls") + END, "a name that leads out of its folder"),
        (one_entry("b/../../a.cls") + END, "a name that leads out of its folder"),
        (one_entry("/a.cls") + END, "a name that leads out of its folder"),
        (one_entry("n" * 5000 + ".cls") + END, "a name of 5,004 characters"),
        (one_entry(kind=tarfile.SYMTYPE, link="/etc/passwd") + END, "a link in place of a file"),
        (one_entry(kind=tarfile.LNKTYPE, link="b.cls") + END, "a link in place of a file"),
        (one_entry(kind=tarfile.CHRTYPE) + END, "an entry of type"),
        (one_entry() + one_entry() + END, r"two files for \.cls of one sample"),
        (one_entry("a.JPG") + one_entry("a.jpg") + END, r"two files for \.jpg of one sample"),
        (one_entry() + END + one_entry("b.cls") + END, "more content after its end mark"),
        (one_entry("README") + END, "has no samples"),
        (END, "has no samples"),
        (b"", "is not a tar archive"),
        (b"\x1f\x8b\x08" + bytes(2000), "is compressed"),
        (b"BZh9" + bytes(2000), "is compressed"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "is compressed"),
        (b"not a tar archive".ljust(2000), "is not a tar archive"),
        (b"".join(one_entry(f"a.{number}") for number in range(1001)) + END, "more than 1,000 kinds of extensions"),
    ],
)
def test_a_strange_archive_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text):
        TarShards(path)
    assert read_or_refuse(read_tar, path, content) == ""


def test_directories_and_global_headers_are_left_out(tmp_path: Path) -> None:
    content = one_entry("d/", kind=tarfile.DIRTYPE) + one_entry(kind=tarfile.XGLTYPE, size=BLOCK)
    content += b"17 comment=global\n".ljust(BLOCK, b"\0") + one_entry("d/a.txt") + END
    (tmp_path / "x.tar").write_bytes(content)
    assert read_tar(tmp_path / "x.tar") == [{"__key__": "d/a", "txt": ""}]


def test_a_file_with_a_hole_claims_any_size_and_costs_no_memory(tmp_path: Path) -> None:
    path, size = tmp_path / "x.tar", 1 << 40
    with path.open("wb") as file:
        file.write(one_entry("a.bin", size))
        file.seek(BLOCK + size)
        file.write(END)
    shards = TarShards(path)
    with pytest.raises(DataError, match=r"a\.bin in .*x\.tar has 1,099,511,627,776 bytes"):
        shards[0]


def test_an_archive_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.data.sources.tar_shards.MAX_MEMBERS", 10)
    write_tar(tmp_path / "x.tar", [(f"{number}.cls", b"1") for number in range(11)])
    with pytest.raises(DataError, match="has too many files"):
        TarShards(tmp_path / "x.tar")


def test_a_parquet_file_that_decodes_to_far_more_than_it_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(500, np.int32)), ["v" * 1_000_000])
    # Without its Arrow schema, the column is read as plain strings.
    pyarrow.parquet.write_table(pyarrow.table({"x": values}), path, store_schema=False)
    assert path.stat().st_size < 1_100_000
    monkeypatch.setattr(parquet_rows, "MAX_ROW_GROUP_BYTES", 20_000_000)
    assert read_or_refuse(read_parquet, path, path.read_bytes()) == ""
    with pytest.raises(DataError, match="is too large to be decoded for a single row"):
        read_parquet(path)
    monkeypatch.setattr(parquet_rows, "MAX_ROW_GROUP_BYTES", 500_000)
    with pytest.raises(DataError, match="is too large to be decoded for a single row"):
        ParquetRows(path)
