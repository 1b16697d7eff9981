"""Python values and tags to msgpack and back: an equal object, or a refusal with its place."""

import collections
import enum
import re
import subprocess
import sys

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dataplane.codec.objects import MAX_DEPTH, pack, unpack
from dataplane.codec.tags import MAX_TAG_BYTES, MAX_TAGS, pack_tags, pack_tags_many
from dataplane.errors import InvalidRequest


def shown(value: object) -> str:
    """A value as a test's name has it: the same in every process, so without an address."""
    return re.sub(r" at 0x\w+", "", repr(value))[:30]


def same(a: object, b: object) -> bool:
    """Equal and of the same types all the way down; NaN is the same as NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return (
            list(map(type, a)) == list(map(type, b))
            and list(a) == list(b)
            and all(map(same, a.values(), b.values()))
        )
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and same(
            a.contiguous().reshape(-1).view(torch.uint8).tolist(),
            b.contiguous().reshape(-1).view(torch.uint8).tolist(),
        )
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return a == b


VALUES = [
    *(None, True, False, 0, -1, 2**63, -(2**63), 2**64 - 1, 1.5, -0.0, float("inf"), float("nan")),
    *("", "q", "\0 é 漢 \U0001f600", b"", b"\xff\0", [], {}, (), [[]], ((),), ((1,), [(2,)])),
    *(2**64, -(2**63) - 1, 2**1000, -(2**200), 1 + 2j, complex("nan"), complex(0.0, -0.0)),
    {"a": 1, 2: "b", b"c": None, True: 1.0, None: 2, 0.5: 3, 2**70: 4},
    [{"role": "user", "content": "hi", "images": [torch.zeros(2, 3, dtype=torch.uint8)]}],
    {"pixel_values": torch.ones(2, 3), "grid": (torch.tensor([1, 2]), np.arange(3))},
    *(np.float32(1.5), np.float64(2.5), np.int64(3), np.bool_(True), np.uint8(255)),
    *(np.complex64(1 + 2j), np.float16("nan"), np.str_("é"), np.bytes_(b"\xff")),
    *(np.arange(6).reshape(2, 3).T, np.array(5), np.zeros((0, 3), np.float16), np.array([True])),
    *(torch.tensor(1.0), torch.zeros(0, 4), torch.arange(6).view(2, 3).t()),
    *(torch.tensor([1.5, -2.0]).to(torch.bfloat16), torch.ones(2).to(torch.float8_e5m2)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{value!r:.30}")
def test_a_value_comes_back_equal_and_of_the_same_types(value: object):
    back = unpack(pack(value))
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
    assert same(back, value), back
    assert same(unpack(np.frombuffer(pack(value), np.uint8)), value)
    assert same(unpack(memoryview(pack(value))), value)


def test_a_big_endian_array_comes_back_native():
    back = unpack(pack(np.arange(3, dtype=">i4")))
    assert back.dtype == np.dtype("int32")
    assert back.tolist() == [0, 1, 2]


def test_tensors_and_arrays_come_back_as_writable_memory_of_their_own():
    packed = pack([torch.arange(3), np.arange(3), torch.ones(2, requires_grad=True)])
    tensor, array, leaf = unpack(packed)
    tensor.add_(1)
    array += 1
    assert not leaf.requires_grad
    assert unpack(packed)[0].tolist() == [0, 1, 2]
    assert unpack(packed)[1].tolist() == [0, 1, 2]


class Flag(enum.IntEnum):
    ON = 1


class Name(str):
    pass


REFUSED = [
    (bytearray(b"x"), "bytearray"),
    (memoryview(b"x"), "memoryview"),
    ({1, 2}, "set"),
    (object(), "object"),
    (Flag.ON, "Flag"),
    (Name("x"), "Name"),
    (collections.OrderedDict(a=1), "OrderedDict"),
    (collections.namedtuple("P", "a")(1), "P"),
    (range(3), "range"),
    (print, "builtin"),
    (msgpack.ExtType(1, b"x"), "ExtType"),
    (msgpack.Timestamp(1), "Timestamp"),
    (np.array(["a"]), "<U1"),
    (np.array([None]), "object"),
    (np.datetime64("2020-01-01"), "datetime64"),
    (np.longdouble(1), "longdouble|float128"),
    (torch.eye(2).to_sparse(), "sparse"),
    (torch.empty(1, device="meta"), "meta"),
    ({(1, 2): 3}, "key of type tuple"),
    ({np.int64(1): 3}, "key of type int64"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=shown)
def test_what_would_not_come_back_equal_is_refused(value: object, message: str):
    with pytest.raises(InvalidRequest, match=message):
        pack(value)
    place = r"value\['turns'\]\[1\]\['x'\]"
    with pytest.raises(InvalidRequest, match=place) as caught:
        pack({"turns": [1, {"x": value}]})
    assert message.split("|")[0].split()[0] in str(caught.value) or "|" in message
    with pytest.raises(InvalidRequest, match=place):
        pack({"turns": (1, {"x": value})})


def test_half_a_surrogate_is_refused():
    for value in ("\ud800", ["\ud800"], {"\ud800": 1}, ("\ud800",)):
        with pytest.raises(InvalidRequest, match="surrogate"):
            pack(value)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_depth_is_limited_alike_on_both_sides(wrap):
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert unpack(pack(value)) == value
    with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} levels"):
        pack(wrap(value))


def test_a_cycle_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidRequest, match="levels deep"):
        pack(value)
    tags: dict[str, object] = {"x": value}
    with pytest.raises(InvalidRequest, match="levels deep"):
        pack_tags(tags)


def ext(code: int, data: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, data))


MALFORMED = [
    b"",
    b"\xc1",
    b"\x93\x01",
    msgpack.packb(1) + b"\x01",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x02",
    b"\xa1\xff",
    b"\x81\x90\x01",
    b"\x91" * 100_000,
    b"\x92\xc7\x00\x01" * 100_000,
    ext(1, b"x"),
    ext(99, b""),
    ext(1, msgpack.packb({})),
    ext(1, b"\xc1"),
    ext(6, b"123"),
    *(ext(code, msgpack.packb(["int64", [2], b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", [-1, -1], b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", [1.0], b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", [2**62, 4], b""])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["os.system", [1], b"1"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["object", [8], b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", [1], "12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", 1, b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb([7, [1], b"12345678"])) for code in (2, 3, 4)),
    *(ext(code, msgpack.packb(["int64", [1]])) for code in (2, 3, 4)),
    ext(3, msgpack.packb(["bfloat16", [1], b"12"])),
    b"\xc7\x03\xff123",
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: data[:16].hex())
def test_malformed_bytes_are_refused(data: bytes):
    with pytest.raises(InvalidRequest):
        unpack(data)


@given(st.binary(max_size=200))
def test_any_bytes_unpack_or_are_refused(data: bytes):
    try:
        unpack(data)
    except InvalidRequest:
        pass


def values(leaves: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    keys = st.one_of(st.text(), st.integers(), st.binary())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(keys, inner, max_size=4),
        ),
        max_leaves=20,
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=200)
@given(
    values(
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), TEXT,
            st.binary(), st.floats(width=32).map(np.float32), st.integers(0, 255).map(np.uint8),
            st.lists(st.integers(0, 9), max_size=3).map(torch.tensor),
            st.lists(st.integers(0, 9), max_size=3).map(np.array),
        )
    )
)  # fmt: skip
def test_any_value_comes_back_equal_or_is_refused(value: object):
    try:
        packed = pack(value)
    except InvalidRequest:
        event("refused")
    else:
        assert same(unpack(packed), value)


def test_packing_tags_needs_no_torch():
    script = (
        "import sys; from dataplane.codec.objects import pack, unpack;"
        "from dataplane.codec.tags import pack_tags;"
        "pack_tags({'a': 1, 'b': (2,)}); assert unpack(pack({'a': (1, 2)})) == {'a': (1, 2)};"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Tags


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        *((None, None), (True, True), (3, 3), (0.5, 0.5), ("é", "é"), ([], []), ({}, {})),
        (np.int64(3), 3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(7), 7),
        (torch.tensor(7), 7),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(True), True),
        ((1, (2, np.int8(3))), [1, [2, 3]]),
        ([[3, 100], [4, 20]], [[3, 100], [4, 20]]),
        ({"a": {"b": (np.float32(1),)}}, {"a": {"b": [1.0]}}),
        ([np.int64(1), torch.tensor(2)], [1, 2]),
    ],
    ids=repr,
)
def test_a_tag_comes_back_as_python(value: object, comes_back: object):
    for packed in (pack_tags({"t": value}), pack_tags_many([{"t": value}])):
        assert same(msgpack.unpackb(packed), {"t": comes_back})


def test_a_tag_may_be_nan_or_infinite():
    back = msgpack.unpackb(pack_tags({"a": float("nan"), "b": float("-inf")}))
    assert same(back, {"a": float("nan"), "b": float("-inf")})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "a bytes"),
        (bytearray(b"x"), "a bytearray"),
        (memoryview(b"x"), "a memoryview"),
        ({1}, "a set"),
        (1 + 2j, "a complex"),
        (2**64, "over 64 bits"),
        (-(2**63) - 1, "over 64 bits"),
        ([2**64], "over 64 bits"),
        ("\ud800", "surrogates not allowed"),
        (Flag.ON, "a Flag"),
        (Name("x"), "a Name"),
        (collections.OrderedDict(a=1), "a OrderedDict"),
        ({1: 2}, "keys of a map are strings, not 1"),
        ([{"a": {2.0: 1}}], r"value\[0\]\['a'\]: the keys of a map"),
        ([[1, b"x"]], r"value\[0\]\[1\]: a bytes"),
        (torch.ones(2), "a Tensor"),
        (torch.ones(1), "a Tensor"),
        (torch.tensor(1 + 2j), "a Tensor"),
        (torch.empty((), device="meta"), "a Tensor"),
        (np.ones(2), "a ndarray"),
        (np.complex64(1), "a complex64"),
        (np.datetime64("2020-01-01"), "a datetime64"),
        (np.bytes_(b"x"), "a bytes_"),
        (msgpack.ExtType(1, b"x"), "a ExtType"),
    ],
    ids=shown,
)
def test_other_tags_are_refused_by_name(value: object, message: str):
    good = {"fine": 1}
    with pytest.raises(InvalidRequest, match=message) as caught:
        pack_tags({"fine": 1, "odd": value})
    assert str(caught.value).startswith("tag 'odd': ")
    with pytest.raises(InvalidRequest, match=message) as caught:
        pack_tags_many([good, {"fine": 1, "odd": value}])
    assert str(caught.value).startswith("tags[1]: tag 'odd': ")


@pytest.mark.parametrize("name", [1, None, b"x", ("a",), "x" * 257, "漢" * 86, Name("x")])
def test_names_of_tags_are_short_strings(name: object):
    with pytest.raises(InvalidRequest, match="the name of a tag"):
        pack_tags({name: 1})  # pyright: ignore[reportArgumentType] (the wrong type is the point)
    with pytest.raises(InvalidRequest, match=r"tags\[1\]: tag .*the name of a tag"):
        pack_tags_many([{}, {name: 1}])  # pyright: ignore[reportArgumentType]


def test_a_name_of_a_tag_is_text():
    with pytest.raises(InvalidRequest, match=r"tag '\\ud800'"):
        pack_tags({"\ud800": 1})


@pytest.mark.parametrize("tags", [None, 1, "ab", [("a", 1)], {1}])
def test_tags_are_a_mapping(tags: object):
    with pytest.raises(InvalidRequest, match=r"tags\[0\]: the tags of a key are a mapping"):
        pack_tags(tags)  # pyright: ignore[reportArgumentType] (the wrong type is the point)


def test_any_mapping_will_do():
    tags = collections.OrderedDict(b=1, a=2)
    assert msgpack.unpackb(pack_tags(tags)) == {"b": 1, "a": 2}


def test_limits_of_tags():
    room = MAX_TAG_BYTES - len(pack_tags({"small": 1, "text": ""})) - 2
    assert len(pack_tags({"small": 1, "text": "x" * room})) == MAX_TAG_BYTES
    with pytest.raises(InvalidRequest, match=r"65537 bytes packed, at most 65536.*'text'"):
        pack_tags({"small": 1, "text": "x" * (room + 1)})
    with pytest.raises(InvalidRequest, match=r"tags\[1\]: 65537 bytes"):
        pack_tags_many([{}, {"small": 1, "text": "x" * (room + 1)}])
    most = {f"t{i}": i for i in range(MAX_TAGS)}
    assert msgpack.unpackb(pack_tags(most)) == most
    assert msgpack.unpackb(pack_tags({"x" * 256: 1})) == {"x" * 256: 1}
    assert msgpack.unpackb(pack_tags({"é" * 128: 1})) == {"é" * 128: 1}
    with pytest.raises(InvalidRequest, match="1025 tags; a key has at most 1024"):
        pack_tags({**most, "one more": 1})


@given(
    st.lists(
        st.dictionaries(
            TEXT.filter(lambda x: len(x.encode()) <= 256),
            st.recursive(
                st.one_of(
                    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT
                ),
                lambda inner: st.one_of(
                    st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)
                ),
                max_leaves=8,
            ),
            max_size=4,
        ),
        max_size=4,
    )
)
def test_many_tags_are_each_ones_tags_in_a_row(tags: list[dict[str, object]]):
    packed = pack_tags_many(tags)
    assert packed == b"".join(map(pack_tags, tags))
    unpacker = msgpack.Unpacker()
    unpacker.feed(packed)
    assert same(list(unpacker), tags)
