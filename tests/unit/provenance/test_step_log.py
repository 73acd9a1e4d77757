"""The record of steps: what a crash, a stranger or another run leaves of it."""

import math
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.errors import CheckpointError
from samebits.provenance.record import (
    FIRST_LINK,
    SKIPPED,
    STEPS_FILE,
    StepLog,
    StepRecord,
    StepWriter,
    copy_steps,
    digest_of_samples,
    extend,
    read_steps,
    write_steps,
)

SIZE = 72
HEADER = 56


def record(step: int, loss: float = 0.5, outcome: int = 0) -> StepRecord:
    return StepRecord(step, loss, 1.0, 0.1, bytes([step % 256] * 16), outcome=outcome)


def written(path: Path, num_steps: int = 5, **changes: float) -> StepWriter:
    """A file of some steps."""
    writer = StepWriter(path, 0, FIRST_LINK)
    for step in range(num_steps):
        writer.append(record(step, **changes))
    writer.close()
    return writer


def test_a_file_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    written(path).close()
    writer = StepWriter(path, 5, read_steps(path).link())
    path.unlink()
    with pytest.raises(CheckpointError):
        writer.append(record(5))
    assert not path.exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.bin"


def test_records_are_read_as_they_were_written(path: Path) -> None:
    link = written(path).link
    log = read_steps(path)
    assert [log.get(step) for step in range(5)] == [record(step) for step in range(5)]
    assert log.get(5) is None
    assert log.get(-1) is None
    assert (log.stop, log.is_whole, log.link()) == (5, True, link)
    assert path.stat().st_size == HEADER + 5 * SIZE


def test_the_link_is_the_sha256_chain_that_the_module_describes(path: Path) -> None:
    written(path, 2)
    link = FIRST_LINK
    for step in range(2):
        link = extend(link, record(step).to_bytes())
    assert read_steps(path).link() == link


def test_each_field_of_each_record_changes_the_link(path: Path) -> None:
    written(path)
    content, link = path.read_bytes(), read_steps(path).link()
    for offset in range(HEADER + 8, HEADER + 5 * SIZE):  # the number of a step is checked by itself
        if (offset - HEADER) % SIZE >= 8:
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            assert read_steps(path).link() != link


def test_a_nan_has_one_form_whatever_its_sign_and_payload() -> None:
    (other,) = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))
    assert record(1, other).to_bytes() == record(1, math.nan).to_bytes()


def test_a_last_record_that_a_crash_cut_off_is_ignored_and_replaced(path: Path) -> None:
    link = written(path).link
    path.write_bytes(path.read_bytes()[:-1])
    assert read_steps(path).stop == 4
    writer = StepWriter(path, 4, read_steps(path).link())
    assert writer.is_continued
    writer.append(record(4))
    writer.close()
    assert read_steps(path).link() == link == writer.link


@pytest.mark.parametrize("step", range(6))
def test_a_run_that_goes_back_repeats_the_later_records(path: Path, step: int) -> None:
    link = written(path).link
    writer = StepWriter(path, step, read_steps(path).head(step).link())
    assert writer.is_continued
    assert read_steps(path).stop == step
    for number in range(step, 5):
        writer.append(record(number))
    writer.close()
    assert read_steps(path).link() == link


@pytest.mark.parametrize("damage", ["other run", "gap", "missing", "empty", "noise", "folder name", "shorter"])
def test_a_file_that_leads_to_no_checkpoint_is_replaced_by_one_that_starts_there(path: Path, damage: str) -> None:
    written(path)
    link = read_steps(path).link()
    content = path.read_bytes()
    if damage == "other run":
        written(path, loss=0.25)
    elif damage == "gap":
        path.write_bytes(content[: HEADER + SIZE] + content[HEADER + 2 * SIZE :])
    elif damage == "missing":
        path.unlink()
    elif damage == "shorter":
        path.write_bytes(content[: HEADER + 3 * SIZE])
    else:
        path.write_bytes({"empty": b"", "noise": os.urandom(500), "folder name": b"steps"}[damage])
    writer = StepWriter(path, 5, link)
    assert not writer.is_continued
    writer.append(record(5))
    writer.close()
    log = read_steps(path)
    assert (log.first_step, log.stop, log.is_whole, log.start_link) == (5, 6, False, link)
    assert log.link() == writer.link == extend(link, record(5).to_bytes())
    # A later resume continues this shorter record, and still knows that its start is missing.
    again = StepWriter(path, 6, log.link())
    assert not again.is_continued
    assert read_steps(path).first_step == 5


def test_a_link_in_the_place_of_the_file_is_replaced_and_its_target_stays(path: Path) -> None:
    target = path.with_name("precious")
    target.write_text("mine")
    path.symlink_to(target)
    written(path)
    assert target.read_text() == "mine"
    assert not path.is_symlink()
    assert read_steps(path).stop == 5


def test_a_link_that_appears_during_training_is_not_followed(path: Path) -> None:
    target = path.with_name("precious")
    target.write_text("mine")
    writer = StepWriter(path, 0, FIRST_LINK)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic links"):
        writer.append(record(0))
    assert target.read_text() == "mine"


def forge_first_step(path: Path, first: int) -> None:
    written(path)
    content = path.read_bytes()
    path.write_bytes(content[:16] + struct.pack("<Q", first) + content[24:])


HUGE = (1 << 64) - 2
WRAPPED = b"".join(struct.pack("<Q", number) + bytes(64) for number in (HUGE, HUGE + 1, 0))
REFUSED: dict[str, tuple[Callable[[Path], object] | bytes, str]] = {
    "a fifo": (os.mkfifo, "not a regular file"),
    "a huge sparse file": (lambda path: (path.touch(), os.truncate(path, 1 << 42)), "at most"),
    **{
        f"a forged first step, {first}": (partial(forge_first_step, first=first), "altered")
        for first in (3, HUGE, 1 << 63)
    },
    "records that wrap around": (b"samebits steps 1" + struct.pack("<Q", HUGE) + FIRST_LINK + WRAPPED, "altered"),
    **{
        f"another format, {len(content)} bytes": (content, "not a record of steps of this version")
        for content in (b"", b"samebits steps 1", b"samebits steps 2" + bytes(40), bytes(200))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_record_is_refused_at_once_and_replaced_by_a_resume(path: Path, case: str) -> None:
    make, said = REFUSED[case]
    if isinstance(make, bytes):
        path.write_bytes(make)
    else:
        make(path)
    with pytest.raises(CheckpointError, match=said):
        read_steps(path)
    written(path)
    assert read_steps(path).stop == 5


def test_a_folder_in_the_place_of_the_file_is_an_error_with_a_fix(path: Path) -> None:
    path.mkdir()
    with pytest.raises(CheckpointError, match="directory"):
        read_steps(path)
    with pytest.raises(CheckpointError) as raised:
        StepWriter(path, 0, FIRST_LINK)
    assert raised.value.slots.get("fix")


@given(content=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "steps.bin"
    path.write_bytes(b"samebits steps 1" + content)
    try:
        log = read_steps(path)
    except CheckpointError:
        return
    assert len(log.link()) == 32
    assert all(isinstance(log.get(step), StepRecord) for step in range(log.first_step, log.stop))


def test_records_before_a_checkpoint_are_copied_for_a_run_that_resumes_elsewhere(path: Path) -> None:
    written(path)
    target = path.with_name("copy.bin")
    link = read_steps(path).head(3).link()
    assert copy_steps(path, target, 3, link)
    writer = StepWriter(target, 3, link)
    assert writer.is_continued
    assert read_steps(target) == read_steps(path).head(3)


@pytest.mark.parametrize(("step", "link"), [(3, bytes(32)), (9, FIRST_LINK)])
def test_records_of_another_run_are_not_copied(path: Path, step: int, link: bytes) -> None:
    written(path)
    assert not copy_steps(path, path.with_name("copy.bin"), step, link)
    assert not path.with_name("copy.bin").exists()


def test_skipped_steps_are_found(path: Path) -> None:
    body = b"".join(record(step, outcome=SKIPPED if step in (1, 4) else 0).to_bytes() for step in range(5))
    write_steps(path, StepLog(body))
    assert read_steps(path).skipped() == [1, 4]
    assert StepLog().skipped() == []


def test_the_digest_of_samples_depends_on_their_order_and_not_on_their_type() -> None:
    ids = np.array([5, 3, 9])
    assert digest_of_samples(ids) == digest_of_samples(ids.astype(">i8"))
    assert digest_of_samples(ids) != digest_of_samples(ids[::-1])


def test_no_partial_file_stays_after_a_write(path: Path) -> None:
    written(path)
    assert os.listdir(path.parent) == [path.name]
    assert path.name == STEPS_FILE
