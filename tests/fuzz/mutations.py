"""Mutations of files: by bytes, by numbers written in text, and by structure."""

import re
from collections.abc import Callable

from hypothesis import strategies as st

Mutation = Callable[[bytes], bytes]

_WORDS = (
    b"\x00", b"\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f",
    b"\x80\x00\x00\x00", b"\x00\x00\x00\x80", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x00\x01\x00\x00", b"PK\x01\x02",
)  # fmt: skip
_NUMBERS = (
    b"0", b"-1", b"1e999", b"-1e308", b"NaN", b"Infinity", b"9" * 19, b"9" * 5000, b"4294967296",
    b"18446744073709551616", b"9223372036854775807", b"2147483648", b"0.5", b"true", b"null", b'"x"', b"[]", b"{}",
    b".inf", b"65535", b"100000000",
)  # fmt: skip
_TEXTS = (
    b"../../x", b"/etc/passwd", b"/dev/zero", b"\\ud800", b"\xc3\x28", b"\x00", b"\n", b"\r", b"\t", b'"', b"\x1b[31m",
    b"*o", b"&o ", b"!!python/object:os.system ", b"<<: ", b"__metadata__", b"\xef\xbb\xbf", b"\xff\xfe", b"{}", b"[",
)  # fmt: skip

# A place in a file as a share of its length; half of them are in its head, where structure is.
places = st.one_of(st.floats(0, 1, exclude_max=True), st.integers(0, 63).map(lambda place: -1.0 - place))


def _at(content: bytes, place: float) -> int:
    return int(place * len(content)) if place >= 0 else min(int(-1 - place), len(content))


def _cut(place: float) -> Mutation:
    return lambda content: content[: _at(content, place)]


def _flip(place: float, bit: int) -> Mutation:
    def mutate(content: bytes) -> bytes:
        at = _at(content, place)
        return content[:at] + bytes(byte ^ (1 << bit) for byte in content[at : at + 1]) + content[at + 1 :]

    return mutate


def _write(place: float, word: bytes) -> Mutation:
    return lambda content: content[: _at(content, place)] + word + content[_at(content, place) + len(word) :]


def _insert(place: float, word: bytes) -> Mutation:
    return lambda content: content[: _at(content, place)] + word + content[_at(content, place) :]


def _repeat(start: float, length: int, times: int) -> Mutation:
    def mutate(content: bytes) -> bytes:
        at = _at(content, start)
        return content[:at] + content[at : at + length] * times + content[at + length :]

    return mutate


def _number(which: float, value: bytes) -> Mutation:
    """Replace a number that is written in digits."""

    def mutate(content: bytes) -> bytes:
        found = list(re.finditer(rb"-?\d+(\.\d+)?", content))
        if not found:
            return content
        match = found[int(which * len(found))]
        return content[: match.start()] + value + content[match.end() :]

    return mutate


def _swap(first: float, second: float, length: int) -> Mutation:
    def mutate(content: bytes) -> bytes:
        one, two = sorted((_at(content, first), _at(content, second)))
        two = max(two, one + length)
        return b"".join(
            (content[:one], content[two : two + length], content[one + length : two], content[one : one + length],
             content[two + length :])
        )  # fmt: skip

    return mutate


shares = st.floats(0, 1, exclude_max=True)
nests = st.tuples(st.sampled_from((b"[", b'{"a":', b"(", b"- ", b"a: [")), st.sampled_from((50, 900, 100_000)))

mutations: st.SearchStrategy[Mutation] = st.one_of(
    st.builds(_cut, places),
    st.builds(_flip, places, st.integers(0, 7)),
    st.builds(_write, places, st.sampled_from(_WORDS)),
    st.builds(_insert, places, st.sampled_from((*_WORDS, *_TEXTS))),
    st.builds(_insert, places, nests.map(lambda nest: nest[0] * nest[1])),
    st.builds(_repeat, places, st.integers(0, 200), st.sampled_from((0, 2, 3, 100, 5000))),
    st.builds(_number, shares, st.sampled_from(_NUMBERS)),
    st.builds(_number, shares, st.integers(-(2**33), 2**33).map(lambda number: b"%d" % number)),
    st.builds(_swap, places, places, st.integers(1, 30)),
)

several = st.lists(mutations, min_size=1, max_size=4)


def mutated(content: bytes, chosen: list[Mutation], most_bytes: int = 4_000_000) -> bytes:
    """A file after mutations, cut at a size."""
    for mutate in chosen:
        content = mutate(content)[:most_bytes]
    return content
