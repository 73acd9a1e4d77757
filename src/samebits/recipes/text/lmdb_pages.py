"""Check the pages of an untrusted LMDB file before the library reads it.

LMDB trusts its file. A page number outside of the file or a node beyond the end of its page crashes the process, and a
tree with a cycle is an endless loop. So each page of the tree is checked once, many pages at a time. Layout from
`struct MDB_page`, `MDB_node`, `MDB_meta` and `MDB_db` in mdb.c of LMDB 0.9:

    page    number: 8 bytes, unused: 2, flags: 2, lower and upper: 2 each, then an offset of 2 bytes for each node
    node    low and high half of a size, or of a page number: 2 each, flags: 2, length of the key: 2, key, value
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import IntArray

_HEAD_BYTES, _NODE_BYTES = 16, 8
_BRANCH, _LEAF, _BIG = 1, 2, 1
_KINDS = 0x6F  # mask of the page flags that define the kind of page
_MAGIC, _VERSION, _NO_ROOT = 0xBEEFC0DE, 1, 2**64 - 1
_MAX_DEPTH = 20  # of a tree with at least two pages below each: 1 TB of pages
_CHUNK_BYTES = 1 << 24

Pages = npt.NDArray[np.uint8]


class _Meta(NamedTuple):
    page_bytes: int
    depth: int
    root: int
    last_page: int
    turn: int


def check_pages(path: Path) -> None:
    """Check all pages of the tree of keys.

    Raises:
        OSError: The file can't be read.
        ValueError: A page is damaged; the message names it.
    """
    content = np.memmap(path, np.uint8, mode="r")
    try:
        meta = _newest_meta(content)
        num_pages = len(content) // meta.page_bytes
        if meta.last_page >= num_pages:
            raise ValueError(
                f"it is truncated: {len(content):,} bytes, {(meta.last_page + 1) * meta.page_bytes:,} needed"
            )
        pages = content[: num_pages * meta.page_bytes].reshape(num_pages, meta.page_bytes)
        is_seen = np.zeros(num_pages, dtype=bool)
        is_seen[:2] = True
        level = np.array([] if meta.root == _NO_ROOT else [meta.root], dtype=np.uint64)
        for depth in range(1, _MAX_DEPTH + 1):
            if not len(level):
                return
            numbers = _whole_numbers(level, is_seen)
            kind = _LEAF if depth == meta.depth else _BRANCH
            size = max(1, _CHUNK_BYTES // meta.page_bytes)
            below = [
                _check_level(pages, numbers[start : start + size], kind, meta.last_page + 1)
                for start in range(0, len(numbers), size)
            ]
            level = np.concatenate(below)
        raise ValueError("its tree has more levels than any file of its size")
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _newest_meta(content: Pages) -> _Meta:
    """Read the newer one of the two meta pages at the start of the file."""
    found = [_meta(content, 0)]
    found.append(_meta(content, found[0].page_bytes))
    if found[0].page_bytes != found[1].page_bytes:
        raise ValueError("its first two pages differ in the size of pages")
    return max(found, key=lambda meta: meta.turn)


def _meta(content: Pages, start: int) -> _Meta:
    raw = content[start : start + 152].tobytes()
    magic, version = struct.unpack_from("<II", raw, 16)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError("it does not start like an LMDB file")
    # After the address and the size of the map: the tree of free pages, whose pad is the page size, and the main tree,
    # each as pad, flags, depth, numbers of branch, leaf and overflow pages, number of entries, and root.
    (page_bytes,) = struct.unpack_from("<I", raw, 40)
    flags, depth = struct.unpack_from("<HH", raw, 92)
    root, last_page, turn = struct.unpack_from("<QQQ", raw, 128)
    if page_bytes not in (1 << power for power in range(9, 17)):
        raise ValueError(f"its pages have {page_bytes:,} bytes")
    if flags:
        raise ValueError("its keys are sorted in another order than in datasets of text lines")
    return _Meta(page_bytes, depth, root, last_page, turn)


def _whole_numbers(level: npt.NDArray[np.uint64], is_seen: npt.NDArray[np.bool_]) -> IntArray:
    """Return the page numbers of a level, after checking that no page occurs twice in the tree."""
    if level.max() >= len(is_seen):
        raise ValueError(f"it has no page {level.max()}")
    numbers = level.astype(np.int64)
    if is_seen[numbers].any() or len(np.unique(numbers)) < len(numbers):
        raise ValueError("its tree contains a page twice")
    is_seen[numbers] = True
    return numbers


def _check_level(pages: Pages, numbers: IntArray, kind: int, end: int) -> npt.NDArray[np.uint64]:
    """Check the pages of one level.

    Args:
        pages: (num_pages, page_bytes) bytes of the file.
        numbers: Numbers of the pages to check.
        kind: _BRANCH or _LEAF.
        end: Number of pages in use.

    Returns:
        Numbers of the pages below; none for leaves.
    """
    mine = np.ascontiguousarray(pages[numbers])
    page_bytes = mine.shape[1]
    heads = mine[:, :_HEAD_BYTES].view("<u2")
    kinds, lower = heads[:, 5] & _KINDS, heads[:, 6].astype(np.int64)
    counts = (lower - _HEAD_BYTES) // 2
    least = 2 if kind == _BRANCH else 1
    bad = (kinds != kind) | (counts < least) | (lower > page_bytes) | (lower % 2 != 0)
    _refuse(numbers, bad, "is not a page of the tree")
    rows = np.repeat(np.arange(len(numbers)), counts)
    node_indices = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = mine.view("<u2")[rows, _HEAD_BYTES // 2 + node_indices].astype(np.int64)
    outside = (starts < lower[rows]) | (starts + _NODE_BYTES > page_bytes) | (starts % 2 != 0)
    _refuse(numbers[rows], outside, "has an entry outside of itself")
    shorts = mine.view("<u2")
    low, high, flags, key_bytes = (shorts[rows, starts // 2 + field].astype(np.uint64) for field in range(4))
    ends = starts.astype(np.uint64) + _NODE_BYTES + key_bytes
    if kind == _BRANCH:
        _refuse(numbers[rows], ends > page_bytes, "has a key beyond its end")
        below: npt.NDArray[np.uint64] = low | high << np.uint64(16) | flags << np.uint64(32)
        return below
    sizes = low | high << np.uint64(16)
    is_big = flags == _BIG
    _refuse(numbers[rows], flags > _BIG, "has an entry of an unknown kind")
    ends += np.where(is_big, 8, sizes)
    _refuse(numbers[rows], ends > page_bytes, "has a value beyond its end")
    _check_big(mine, numbers, rows[is_big], (ends[is_big] - 8).astype(np.int64), sizes[is_big], end)
    return np.array([], dtype=np.uint64)


def _check_big(mine: Pages, numbers: IntArray, rows: IntArray, at: IntArray, sizes: IntArray, end: int) -> None:
    """Check values on overflow pages; the number of the first one is at offset `at` of the page."""
    firsts = mine[rows[:, None], at[:, None] + np.arange(8)].view("<u8")[:, 0]
    needed = (_HEAD_BYTES + sizes + mine.shape[1] - 1) // np.uint64(mine.shape[1])
    outside = (firsts < 2) | (firsts > end) | (firsts + needed > end)
    _refuse(numbers[rows], outside, "has a value beyond the end of the file")


def _refuse(numbers: IntArray, is_bad: npt.NDArray[np.bool_], why: str) -> None:
    if is_bad.any():
        raise ValueError(f"page {numbers[int(is_bad.argmax())]} {why}")
