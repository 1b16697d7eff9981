"""What a row's bytes may say: templates of blocks, Python values, containers over rows, `where`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import torch

from dataplane.codec import containers, objects
from dataplane.codec.containers import FieldData
from dataplane.codec.shapes import ITEM_BYTES, MAX_RANK, OBJECT
from dataplane.codec.tags import pack_tags, pack_tags_many
from dataplane.codec.template import MAX_BLOCK_BYTES, Template
from dataplane.errors import InvalidRequest
from dataplane.tags.placement import Placement
from dataplane.tags.query import compile_where
from tests.dataplane.audit import COLUMNS
from tests.fuzz import trees
from tests.fuzz.target import KiB, MiB, Target

# -- templates ---------------------------------------------------------------------------------


def _template(data: bytes) -> None:
    match trees.value_in(data):
        case [bytes(blob), int(rows), bytes(lengths)]:
            pass
        case _:
            return
    template = Template.parse(blob)
    total = template.block_bytes(lengths, rows)
    assert 0 < total <= MAX_BLOCK_BYTES + (1 << 20)
    assert total >= len(template.front(lengths, rows))
    placement = Placement("s", 1, 1, 4096, total, template, rows, lengths)
    assert 0 <= placement.payload_bytes <= total
    sizes = np.frombuffer(lengths, np.int32).reshape(template.num_free, 1, rows)
    layout = template.layout(sizes, rows)
    assert int(layout.total[0]) == total
    if layout.nbytes.size:
        assert int(layout.nbytes.min()) >= 0
        assert int((layout.offsets + layout.nbytes).max()) <= total


def _template_seeds() -> Iterator[bytes]:
    template = Template(tuple(COLUMNS.values()))
    for rows in (1, 3):
        lengths = np.arange(template.num_free * rows, dtype=np.int32).tobytes()
        yield msgpack.packb([template.blob, rows, lengths])
    for free, rows, length in ((1, 1, -1), (8, 1, (1 << 31) - 1), (4, 2, 1 << 30), (1, 65_536, 1)):
        blob = msgpack.packb([["x", "complex128", 0, [-1] * free]])
        yield msgpack.packb([blob, rows, np.full(free * min(rows, 9), length, np.int32).tobytes()])
    yield msgpack.packb([msgpack.packb([["x", "int8", 0, [(1 << 31) - 1] * 8]]), 1, b""])
    yield msgpack.packb([b"\xdd\xff\xff\xff\xff", 1, b""])
    yield msgpack.packb([b"\x91" * 4000, 1, b""])


# -- Python values -----------------------------------------------------------------------------


def _object(data: bytes) -> None:
    value = objects.unpack(data)
    try:
        packed = objects.pack(value)
    except InvalidRequest:
        return  # read with more levels than are written
    again = objects.pack(objects.unpack(packed))
    assert packed == again


def _values() -> list[Any]:
    return [
        None, True, 5, 1 << 100, -1.5, 1 + 2j, "text", b"bytes", [1, [2]], (1, (2, 3)),
        {"a": {1: None, b"k": 2}}, torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bfloat16),
        np.arange(3.0), np.float32(1.5), np.str_("s"), np.bytes_(b"b"), np.zeros((0, 2), bool),
        {"messages": [{"role": "user", "content": "hi"}], "extra": (torch.zeros(()), np.int8(3))},
    ]  # fmt: skip


def _object_seeds() -> Iterator[bytes]:
    for value in _values():
        yield objects.pack(value)
    for code in (2, 3, 4):
        for name, shape, cells in (
            ("int64", [1 << 40], b""), ("int64", [1 << 40, 0], b""), ("int8", [-1, -1], b"x"),
            ("object", [1], b"x"), ("float64", [0] * 100, b""), ("complex32", [1], b"1234"),
            ("bfloat16", [1], b"12"), ("bool", [2], b"\2\3"), ("str", [], b"x"), ("int8", [], b"x"),
            ("int8", [1] * 70, b"x"), ("int8", [1 << 70 - 8, 0], b""), ("O", [1], bytes(8)),
        ):  # fmt: skip
            yield msgpack.packb(msgpack.ExtType(code, msgpack.packb([name, shape, cells])))
    yield msgpack.packb(msgpack.ExtType(5, b"\xff" * 2000))
    yield msgpack.packb(msgpack.ExtType(6, b"\xff" * 15))
    yield b"\x91" * 4000
    yield b"\x92\xc7\x00\x01" * 1000
    yield b"\xdd\xff\xff\xff\xff"
    yield b"\xdf\xff\xff\xff\xff"
    yield b"\xc9\xff\xff\xff\xff\3"


# -- containers --------------------------------------------------------------------------------

_DTYPES = sorted(ITEM_BYTES)


def _containers(data: bytes) -> None:
    """Rows as a get has copied them: sizes that fit the bytes, the rest as it comes."""
    if len(data) < 4:
        return
    dtype, rank = _DTYPES[data[0] % len(_DTYPES)], data[1] % (MAX_RANK + 1)
    ragged = data[2] % rank if rank else None
    if dtype == OBJECT:
        rank, ragged = 1, 0
    rows = data[3] % 5
    dims = np.frombuffer(data[4 : 4 + rows * rank].ljust(rows * rank, b"\1"), np.uint8) % 5
    shapes = dims.astype(np.int32).reshape(rows, rank)
    rest = data[4 + rows * rank :]
    if dtype == OBJECT:
        sizes, rest = _cut(rest, rows)
        shapes = np.array(sizes, np.int32).reshape(rows, 1)
        nbytes = int(shapes.sum())
    else:
        nbytes = int(shapes.prod(axis=1, dtype=np.int64).sum()) * ITEM_BYTES[dtype]
    if nbytes > 64 * KiB:
        return
    buffer = np.frombuffer(bytearray(rest[:nbytes].ljust(nbytes, b"\0")), np.uint8)
    field = FieldData("x", dtype, rank, ragged, buffer, shapes)
    for container in (
        containers.as_list, containers.nested, containers.padded, containers.packed,
    ):  # fmt: skip
        try:
            container(field)
        except InvalidRequest:
            pass


def _cut(rest: bytes, rows: int) -> tuple[list[int], bytes]:
    """The sizes of packed values that follow each other, as far as they are some."""
    sizes = [0] * rows
    for i in range(rows):
        sizes[i] = len(rest) // max(rows, 1)
    return sizes, rest


def _containers_seeds() -> Iterator[bytes]:
    for i in range(len(_DTYPES)):
        for rank in range(4):
            yield bytes([i, rank, rank // 2, 3, *range(1, 1 + 3 * rank), *range(200)])
    at = _DTYPES.index(OBJECT)
    packed = objects.pack({"a": (1, 2.5)})
    yield bytes([at, 1, 0, 2]) + b"\1\1" + packed * 2


# -- tags that are packed ----------------------------------------------------------------------


def _packing(data: bytes) -> None:
    """Tags as a caller has them: any values, of numpy and torch too."""
    tags = trees.value_in(data)
    if type(tags) is not list or not all(type(of) is dict for of in tags):
        return
    rows = [{name: _live(value) for name, value in of.items()} for of in tags]
    many = pack_tags_many(rows)
    assert many == b"".join(map(pack_tags, rows))


def _live(value: Any) -> Any:
    """Scalars of numpy and torch stand in maps of one entry, since msgpack has none."""
    match value:
        case {"np": str(dtype), **rest} if dtype in ("int8", "uint64", "float32", "bool", "str"):
            try:
                return np.array([rest.get("v")]).astype(dtype)[0]
            except (ValueError, TypeError, OverflowError):
                return None
        case {"torch": number} if type(number) in (int, float, bool) and abs(number) < 1 << 63:
            return torch.tensor(number)
        case {"tuple": list(items)}:
            return tuple(items)
        case _:
            return value


def _packing_seeds() -> Iterator[bytes]:
    yield msgpack.packb([{"n": 1, "s": "x", "l": [1, [2, None]], "m": {"a": True}}])
    yield msgpack.packb([{"n": {"np": "int8", "v": 3}, "t": {"torch": 2.5}}, {"x": {"tuple": [1]}}])
    yield msgpack.packb([{"": 1}, {"x" * 300: 2}, {"y": b"bytes"}])
    yield msgpack.packb([{"deep": [[[[[[[[[[1]]]]]]]]]]}, {"u": (1 << 64) - 1}])
    yield msgpack.packb([{f"t{i}": i for i in range(1100)}])


# -- where -------------------------------------------------------------------------------------

_ROWS: list[dict[str, Any]] = [
    {}, {"a": 1}, {"a": 1.0, "b": "x"}, {"a": True}, {"a": None}, {"a": [1, [2]]}, {"a": "1"},
    {"a": float("nan")}, {"a": {"m": 1}}, {"a": (1 << 64) - 1, "b": -(1 << 63)}, {"b": [True]},
]  # fmt: skip


def _where(data: bytes) -> None:
    where = trees.value_in(data)
    predicate = compile_where(where)
    canonical = predicate.canonical
    again = compile_where(msgpack.unpackb(canonical))
    assert again.canonical == canonical
    for name, _ in predicate.terms:
        assert predicate.names(name)
    for row in _ROWS:
        held = predicate(row)
        assert type(held) is bool
        assert again(row) is held
        if held:
            assert all(row.get(name) == value for name, value in predicate.terms)


def _where_seeds() -> Iterator[bytes]:
    for where in (
        None, {}, {"a": 1}, {"a": {"in": [1, "x", True, [1, [2]], None]}}, {"b": {"exists": True}},
        {"or": [{"a": {">": 1}}, {"not": {"b": {"<=": "x"}}}]}, {"a": {"!=": 1.0}},
        {"and": [{"a": 1}, {"a": 1.0}, {"or": [{"a": True}, {}]}]}, {"not": {"not": {"a": None}}},
        {"a": {"in": list(range(100))}}, {"a": float("nan")}, {"a": {"=": [float("nan")]}},
        {"a": {"in": []}}, {"or": []}, {"a": {}}, {5: 1}, {"a": {"=": {"m": 1}}}, [1], "a",
        {"a": {"in": [(1 << 64) - 1, -1]}}, {"a": {"<": True}}, {"a": {"exists": 1}},
        {"dataplane.lost": {"exists": True}},
    ):  # fmt: skip
        yield msgpack.packb(where)
    yield b"\x81\xa3not" * 900 + b"\xc0"
    yield b"\x81\xa2or\x91" * 900 + b"\x80"
    yield b"\x81\xa1a" + b"\x91" * 1000 + b"\x01"


def _whole(mutate: Any) -> Any:
    """Also changes what is packed in the first part of an input."""

    def changed(data: bytes, chance: random.Random) -> bytes:
        value = trees.value_in(data)
        if type(value) is list and value and type(value[0]) is bytes and chance.random() < 0.5:
            return trees.packed([mutate(value[0], chance), *value[1:]])
        return mutate(data, chance)

    return changed


TARGETS = [
    Target(
        "template", _template, _template_seeds, (InvalidRequest,), mutate=_whole(trees.by_trees()),
        plant=trees.planted(), limit_bytes=16 * MiB,
    ),
    Target(
        "objects", _object, _object_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
    Target("containers", _containers, _containers_seeds, (InvalidRequest,)),
    Target(
        "pack-tags", _packing, _packing_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
    Target(
        "where", _where, _where_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
]  # fmt: skip
