"""Keys, partition names and tags at the door: what is taken, what is refused and in which words."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.codec.tags import MAX_TAG_BYTES
from dataplane.errors import InvalidRequest
from dataplane.tags.keys import MAX_KEY_BYTES, MAX_KEYS, check_keys, check_name, unpack_tags

GOOD = [
    "a", "u1_0_0", "{uid}_{session_id}_{index}", "with space", "ключ", "鍵", "🔑", "a.b", "...",
    "a..b", "..a", "a/b", "/etc/passwd", "-rf", "~", "a" * MAX_KEY_BYTES,
    "é" * (MAX_KEY_BYTES // 2), "\u00a0", "\u200b", "C:\\x", "%00", "NULL",
]  # fmt: skip

BAD = [
    ("", "the empty string"),
    ("a" * (MAX_KEY_BYTES + 1), "has 1025 bytes; at most 1024"),
    ("é" * (MAX_KEY_BYTES // 2 + 1), "has 1026 bytes"),
    ("a" * 10_000, "has 10000 bytes"),
    ("nul\0", "control characters"),
    ("line\nbreak", "control characters"),
    ("\x1b[31mred", "control characters"),
    ("del\x7f", "control characters"),
    ("\x9b31m", "control characters"),
    ("para\u2029graph", "control characters"),
    ("\ud800", "not valid Unicode"),
    ("..", r"'\.\.' path component"),
    ("../x", r"'\.\.' path component"),
    ("a/../b", r"'\.\.' path component"),
    ("a\\..\\b", r"'\.\.' path component"),
    ("a/..", r"'\.\.' path component"),
]

NOT_STRINGS = [None, 1, 1.5, True, b"bytes", ["a"], {"a": 1}]


@pytest.mark.parametrize("key", GOOD)
def test_a_good_key_is_taken_alone_and_among_others(key: str) -> None:
    assert check_name(key, "key") == key
    assert check_keys([key]) == [key]
    assert check_keys(["x1", key, "x2"]) == ["x1", key, "x2"]


@pytest.mark.parametrize(("key", "why"), BAD)
def test_a_bad_key_is_refused_alone_and_among_others(key: str, why: str) -> None:
    for attempt in (
        lambda: check_name(key, "key"),
        lambda: check_keys([key]),
        lambda: check_keys(["x1", key, "x2"]),
        lambda: check_keys([key, "x2"], unique=False),
    ):
        with pytest.raises(InvalidRequest, match=why) as error:
            attempt()
        text = str(error.value)
        assert len(text) < 300  # names the key without repeating 10 kB of it
        assert text.isprintable()


@pytest.mark.parametrize("key", NOT_STRINGS)
def test_a_key_that_is_no_string_is_named_with_its_type(key: object) -> None:
    with pytest.raises(InvalidRequest, match=f"a key is a string, not {type(key).__name__}"):
        check_keys(["a", key])
    with pytest.raises(InvalidRequest, match=f"a key is a string, not {type(key).__name__}"):
        check_name(key, "key")


@pytest.mark.parametrize("keys", [None, "abc", ("a",), {"a": 1}, 7, b"abc"])
def test_keys_are_a_list(keys: object) -> None:
    with pytest.raises(InvalidRequest, match="keys are a list of strings, not"):
        check_keys(keys)


def test_no_keys_are_no_error() -> None:
    assert check_keys([]) == []


def test_a_put_names_a_key_once_and_a_get_may_repeat_it() -> None:
    assert check_keys(["a", "b", "a"], unique=False) == ["a", "b", "a"]
    with pytest.raises(InvalidRequest, match="repeated: 'a', 'c'"):
        check_keys(["c", "a", "b", "a", "c", "a"])


def test_a_request_takes_65536_keys_and_not_one_more() -> None:
    keys = [f"k{i}" for i in range(MAX_KEYS)]
    assert check_keys(keys) is keys
    with pytest.raises(InvalidRequest, match="65537 keys in one request; at most 65536"):
        check_keys([*keys, "one more"])


def test_dots_of_two_neighbouring_keys_are_no_path_component() -> None:
    assert check_keys(["a.", ".b", "/.", "./"]) == ["a.", ".b", "/.", "./"]


@given(
    st.lists(st.text(st.characters(codec=None), max_size=6), min_size=1, max_size=5, unique=True)
)
def test_many_keys_are_judged_like_each_of_them(keys: list[str]) -> None:
    def good(key: str) -> bool:
        try:
            return check_name(key, "key") == key
        except InvalidRequest:
            return False

    if all(map(good, keys)):
        assert check_keys(keys) == keys
    else:
        with pytest.raises(InvalidRequest):
            check_keys(keys)


# -- tags

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=8)


@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=4))
def test_tags_come_out_as_they_went_in_with_their_packed_sizes(tags: list[dict[str, Any]]) -> None:
    parts = [msgpack.packb(tag) for tag in tags]
    keys = [f"k{i}" for i in range(len(tags))]
    out, sizes = unpack_tags(b"".join(parts), keys)
    assert [msgpack.packb(tag) for tag in out] == parts  # NaN and -0.0 told apart too
    assert sizes == [len(part) for part in parts]


def at_depth(depth: int) -> bytes:
    return b"\x81\xa1t" + b"\x91" * depth + b"\x00"


EMPTY = b"\x80"
REFUSED_TAGS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "plain values"),
    "cut short": (msgpack.packb({"a": "text"})[:-1], "plain values"),
    "random bytes": (b"\xc1\xff", "plain values"),
    "a list": (b"\x90", "not a mapping"),
    "a number": (b"\x07", "not a mapping"),
    "a string": (b"\xa1a", "not a mapping"),
    "bytes": (msgpack.packb({"t": b"x"}), "plain values"),
    "bytes in a list": (msgpack.packb({"t": [b"xyz"]}), "plain values"),
    "a timestamp": (msgpack.packb({"t": msgpack.Timestamp(1)}), "plain values"),
    "an extension type": (msgpack.packb({"t": msgpack.ExtType(5, b"x")}), "plain values"),
    "an empty extension type": (msgpack.packb({"t": msgpack.ExtType(5, b"")}), "plain values"),
    "half a surrogate": (b"\x81\xa1t\xa3\xed\xa0\x80", "plain values"),
    "a number as a name": (msgpack.packb({1: 2}), "plain values"),
    "a number as a name inside": (msgpack.packb({"t": {1: 2}}), "plain values"),
    "bytes as a name": (msgpack.packb({b"t": 2}), "plain values"),
    "an empty name": (msgpack.packb({"": 2}), "a tag name is"),
    "a control character in a name": (msgpack.packb({"a\tb": 2}), "a tag name is"),
    "a name of 257 bytes": (msgpack.packb({"n" * 257: 2}), "a tag name is"),
    "a name of the columns of a listing": (msgpack.packb({"\0fields": 2}), "a tag name is"),
    "too large": (msgpack.packb({"t": "x" * MAX_TAG_BYTES}), "at most 65536"),
    "nested beyond all measure": (at_depth(2000), "plain values"),
    "a list that claims 2^32 items": (b"\x81\xa1t\xdd\xff\xff\xff\xff", "plain values"),
}


@pytest.mark.parametrize(("packed", "why"), REFUSED_TAGS.values(), ids=REFUSED_TAGS)
def test_tags_that_will_not_do_are_refused_alone_and_among_others(packed: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as error:
        unpack_tags(packed, ["the culprit"])
    assert "tag name" in why or "the culprit" in str(error.value)
    with pytest.raises(InvalidRequest, match=why) as error:
        unpack_tags(EMPTY + packed + (EMPTY if packed else b""), ["first", "the culprit", "last"])
    assert "last" not in str(error.value) or not packed


def test_more_maps_than_keys_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        unpack_tags(EMPTY * 2, ["a"])
    with pytest.raises(InvalidRequest, match="tags for more than the 2 keys"):
        unpack_tags(EMPTY * 3, ["a", "b"])


def test_a_refused_tag_name_is_refused_again_and_a_good_one_taken_again() -> None:
    for _ in range(2):
        assert unpack_tags(msgpack.packb({"fine": 1}), ["a"]) == ([{"fine": 1}], [7])
        with pytest.raises(InvalidRequest):
            unpack_tags(msgpack.packb({"not\nfine": 1}), ["a"])


def test_a_name_of_256_bytes_and_a_key_of_the_most_bytes_are_taken() -> None:
    name = "é" * 128
    over = len(msgpack.packb({name: "x" * 60_000})) - 60_000
    tags = {name: "x" * (MAX_TAG_BYTES - over)}
    assert unpack_tags(msgpack.packb(tags), ["a"]) == ([tags], [MAX_TAG_BYTES])
