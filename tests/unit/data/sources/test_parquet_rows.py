"""Parquet files: rows by index through few row groups, columns and decoding, files that change, workers."""

import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.samples import DatasetSamples
from samebits.data.sources.decoding import decode_rgb
from samebits.data.sources.parquet_rows import ParquetRows
from samebits.errors import ConfigError, DataError
from tests.unit.data.sources.test_tar_shards import png


def write(path: Path, first: int, last: int, **options: int) -> Path:
    table = pyarrow.table({"x": list(range(first, last)), "square.y": [number**2 for number in range(first, last)]})
    pyarrow.parquet.write_table(table, path, **options)
    return path


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    row_group_size=st.integers(1, 9),
    cache_bytes=st.sampled_from([0, 100, 1 << 20]),
    data=st.data(),
)
def test_any_row_is_at_its_index(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    row_group_size: int,
    cache_bytes: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("p")
    count = 0
    for number, size in enumerate(sizes):
        write(folder / f"{number}.parquet", count, count + size, row_group_size=row_group_size)
        count += size
    rows = ParquetRows(folder, cache_bytes=cache_bytes)
    assert len(rows) == count
    for index in data.draw(st.permutations(range(-count, count))):
        assert rows[index] == {"x": index % count, "square.y": (index % count) ** 2}
    for index in (count, -count - 1):
        with pytest.raises(IndexError, match=f"of {count}"):
            rows[index]


def test_columns_make_a_tuple_and_functions_decode_them(tmp_path: Path) -> None:
    images = [png(red) for red in range(5)]
    table = pyarrow.table(
        {"label": range(5), "image": images, "stored": [{"bytes": image, "path": None} for image in images]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    rows = ParquetRows(
        tmp_path / "x.parquet",
        ("image", "stored", "label"),
        decode={"image": decode_rgb, "stored": decode_rgb},
        transform=lambda row: (row[0][0, 0, 0], row[1].shape, row[2]),
    )
    assert [rows[index] for index in range(5)] == [(index, (3, 4, 3), index) for index in range(5)]
    for options in ({"columns": ("image", "nothing")}, {"decode": {"nothing": decode_rgb}}):
        with pytest.raises(ConfigError, match="has no column nothing") as error:
            ParquetRows(tmp_path, **options)
        assert "label, image, stored" in str(error.value)
    with pytest.raises(DataError, match="not the content of an image file"):
        ParquetRows(tmp_path, ("label",), decode={"label": decode_rgb})[0]


@pytest.mark.parametrize("column", ["image", "photo"])
def test_a_row_with_the_path_of_a_file_alone_names_it(tmp_path: Path, column: str) -> None:
    values = [{"bytes": None, "path": "photos/apple/017.jpg"}]
    pyarrow.parquet.write_table(pyarrow.table({column: values, "label": [0]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="has only the path of an image file") as error:
        ParquetRows(tmp_path, (column,), decode={column: decode_rgb})[0]
    assert error.value.slots["given"] == "photos/apple/017.jpg"
    assert "to_parquet" in error.value.slots["fix"]


def test_a_row_with_neither_content_nor_path_has_none(tmp_path: Path) -> None:
    for values in ([{"bytes": None, "path": None}], [{"bytes": "text", "path": "a.jpg"}]):
        pyarrow.parquet.write_table(pyarrow.table({"image": values, "label": [0]}), tmp_path / "x.parquet")
        with pytest.raises(DataError, match="not the content of an image file"):
            ParquetRows(tmp_path, ("image",), decode={"image": decode_rgb})[0]


def test_a_row_group_is_decoded_once_while_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.parquet", 0, 30, row_group_size=10)
    decoded: list[int] = []
    read = ParquetRows._read
    monkeypatch.setattr(ParquetRows, "_read", lambda self, group: (decoded.append(group.number), read(self, group))[1])
    rows = ParquetRows(tmp_path)
    assert [rows[index]["x"] for index in (3, 25, 4, 29, 0)] == [3, 25, 4, 29, 0]
    assert decoded == [0, 2]
    decoded.clear()
    small = ParquetRows(tmp_path, cache_bytes=1)
    assert [small[index]["x"] for index in (3, 4, 25, 0)] == [3, 4, 25, 0]
    assert decoded == [0, 2, 0]


def test_large_row_groups_that_do_not_fit_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = pyarrow.table({"x": [bytes([number]) * 1_000_000 for number in range(4)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2, use_dictionary=False)
    ParquetRows(tmp_path, cache_bytes=1_000_000)
    assert caplog.text == ""
    monkeypatch.setattr("samebits.data.sources.parquet_rows._LARGE_BYTES", 1_000_000)
    ParquetRows(tmp_path)
    assert caplog.text == ""
    ParquetRows(tmp_path, cache_bytes=1_000_000)
    assert "row groups have 2 MB on average" in caplog.text
    assert "row_group_size=100" in caplog.text


def test_a_file_that_changes_during_training_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 4, row_group_size=2)
    rows = ParquetRows(tmp_path)
    write(tmp_path / "a.parquet", 4, 9, row_group_size=2)
    with pytest.raises(DataError, match=r"a\.parquet has changed since it was indexed"):
        rows[0]


def test_files_are_open_only_while_a_row_group_is_read(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"{number}.parquet", number, number + 1)
    rows = ParquetRows(tmp_path, cache_bytes=1)
    num_open = len(os.listdir("/proc/self/fd"))
    assert [rows[number]["x"] for number in (0, 1, 2, 3, 4, 0, 2)] == [0, 1, 2, 3, 4, 0, 2]
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert DatasetSamples(rows).files == [str(tmp_path / f"{number}.parquet") for number in range(5)]


def test_rows_reach_a_started_process(tmp_path: Path) -> None:
    rows = ParquetRows(write(tmp_path / "x.parquet", 0, 3), ("x",))
    assert rows[2] == (2,)
    assert pickle.loads(pickle.dumps(rows))[2] == (2,)


def test_a_file_that_is_not_parquet_or_has_no_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"x\.parquet can't be read as Parquet"):
        ParquetRows(tmp_path)
    write(tmp_path / "x.parquet", 0, 0)
    with pytest.raises(DataError, match="has no rows"):
        ParquetRows(tmp_path)


def test_without_pyarrow_the_package_to_install_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.modules['pyarrow'] = None\nimport samebits\n"
    program += "try: samebits.ParquetRows('x.parquet')\nexcept samebits.ConfigError as error: print(error)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "reading Parquet needs pyarrow" in done.stdout
    assert 'Run pip install "samebits[parquet]".' in done.stdout


@pytest.mark.parametrize(("num_rows", "num_bytes"), [(25, 100_000_000), (2, 80_000_000), (200, 70_000_000)])
def test_a_small_file_that_decodes_to_gigabytes_is_refused_before_it_is_decoded(
    tmp_path: Path, num_rows: int, num_bytes: int
) -> None:
    path = tmp_path / "a.parquet"
    one = pyarrow.array([bytes(num_bytes)])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, pyarrow.int32()), one)
    pyarrow.parquet.write_table(pyarrow.table({"image": rows}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="too large to be decoded") as raised:
        ParquetRows([str(path)])
    assert "from a file of" in raised.value.slots["given"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
