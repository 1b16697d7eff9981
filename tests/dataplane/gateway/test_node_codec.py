"""The codec of the Node.js example: it reads and writes what protobuf does, and is fresh."""

from __future__ import annotations

import importlib.util
import json
import random
import string
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.nodejs import EXAMPLE, node_command

CODEC = Path(__file__).with_name("node_codec.mjs")

TYPES: dict[str, type[Message]] = {
    name: getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name
}
MESSAGES_OF_A_TYPE = 24


def outcomes(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the codec makes of each case."""
    ran = subprocess.run(
        [node_command(), str(CODEC), str(EXAMPLE / "dataplane.mjs")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return json.loads(ran.stdout)


# -- messages as the script tells them ------------------------------------------------------------

WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}
NARROW = {
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_ENUM,
    FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE,
}  # fmt: skip


def told(message: Message) -> dict[str, Any]:
    """A message as JavaScript has it: what knows whether it is set is there only if it is."""
    found: dict[str, Any] = {}
    for its in message.DESCRIPTOR.fields:
        value = getattr(message, its.name)
        if its.message_type is not None and its.message_type.GetOptions().map_entry:
            key, item = its.message_type.fields
            # Each look at a map of messages may make an entry, so keys come first.
            pairs = [[told_one(key, name), told_one(item, value[name])] for name in list(value)]
            found[its.name] = {"$": "m", "v": sorted(pairs, key=json.dumps)}
        elif its.is_repeated:
            found[its.name] = [told_one(its, item) for item in value]
        elif not its.has_presence or message.HasField(its.name):
            found[its.name] = told_one(its, value)
    return found


def told_one(its: FieldDescriptor, value: Any) -> Any:
    if its.message_type is not None:
        return told(value)
    if its.cpp_type in WIDE:
        return {"$": "n", "v": str(value)}
    if its.cpp_type in NARROW:
        return {"$": "f", "v": struct.pack(">d", value).hex()}
    return {"$": "b", "v": value.hex()} if its.type == FieldDescriptor.TYPE_BYTES else value


def in_order(object_: Any) -> Any:
    """What was told, with the pairs of maps in one order."""
    if isinstance(object_, list):
        return [in_order(item) for item in object_]
    if not isinstance(object_, dict):
        return object_
    if object_.get("$") == "m":
        return {"$": "m", "v": sorted(map(in_order, object_["v"]), key=json.dumps)}
    return {name: in_order(item) for name, item in object_.items()}


# -- messages of any kind -------------------------------------------------------------------------

NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 127, 128, 300, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 2**28, 2**35, 2**53 + 1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2**64 - 1],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -0.0, 1.5, -2.0, 5e-324, float("inf"), 0.1],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, -0.0, 1.5, -2.0, float("-inf"), 2**-149],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 77, -1],
}
TEXTS = ["", "a", "ü", "日本", "🙂\x00", "\ufeff", "__proto__", string.printable, "x" * 200]


def filled(kind: Descriptor, rng: random.Random, depth: int = 0) -> Message:
    """A message with about half of its fields set."""
    message = TYPES[kind.name]()
    for its in rng.sample([*kind.fields], len(kind.fields)):  # the last of a oneof stays
        if rng.random() < 0.4 or (its.message_type is not None and depth > 3):
            continue
        if its.message_type is not None and its.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, its.name), its.message_type, rng, depth)
        elif its.is_repeated:
            size = rng.choice([0, 1, 3, 40 if its.message_type is None else 2])
            getattr(message, its.name).extend(_any(its, rng, depth) for _ in range(size))
        elif its.message_type is not None:
            getattr(message, its.name).CopyFrom(_any(its, rng, depth))
        else:
            setattr(message, its.name, _any(its, rng, depth))
    return message


def _fill_map(into: Any, entry: Descriptor, rng: random.Random, depth: int) -> None:
    key, item = entry.fields
    for _ in range(rng.choice([0, 1, 3])):
        name = _any(key, rng, depth)
        if item.message_type is None:
            into[name] = _any(item, rng, depth)
        else:
            into[name].CopyFrom(_any(item, rng, depth))


def _any(its: FieldDescriptor, rng: random.Random, depth: int) -> Any:
    if its.message_type is not None:
        return filled(its.message_type, rng, depth + 1)
    if its.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice([b"", b"\x00\xff", rng.randbytes(300)])
    if its.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    return rng.choice(NUMBERS[its.cpp_type])


def any_messages() -> Iterator[tuple[str, Message]]:
    rng = random.Random(7)
    for name, cls in TYPES.items():
        yield name, cls()
        for _ in range(MESSAGES_OF_A_TYPE):
            yield name, filled(cls.DESCRIPTOR, rng)


def test_every_kind_of_field_is_among_the_messages() -> None:
    """So that what follows is about all of them."""
    used = {
        (its.type, its.is_repeated)
        for _, message in any_messages()
        for its, _ in message.ListFields()
    }
    of_protocol = {
        (its.type, its.is_repeated) for cls in TYPES.values() for its in cls.DESCRIPTOR.fields
    }
    assert used == of_protocol


def test_messages_are_read_and_written_as_protobuf_does() -> None:
    made = list(any_messages())
    cases: list[dict[str, Any]] = []
    for name, message in made:
        cases.append({"type": name, "bytes": message.SerializeToString().hex()})
        cases.append({"type": name, "object": told(message)})
    found = outcomes(cases)
    for i, (name, message) in enumerate(made):
        assert in_order(found[2 * i].get("object")) == told(message), (name, found[2 * i])
        assert "bytes" in found[2 * i + 1], (name, found[2 * i + 1])
        written = TYPES[name].FromString(bytes.fromhex(found[2 * i + 1]["bytes"]))
        assert written == message, name
        # Equal numbers may differ in sign or in what is set: the bytes tell.
        assert told(written) == told(message), name


def tag(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


UNKNOWN = (
    tag(15, 0) + b"\xff" * 9 + b"\x01" + tag(15, 1) + b"\x00" * 8 + tag(15, 2) + b"\x02ab"
    + tag(15, 5) + b"\x00" * 4 + tag(15, 3) + tag(1, 0) + b"\x05" + tag(15, 4)
)  # fmt: skip
"""A field of each wire type, of a number that small messages do not have."""


VARIANTS: dict[str, tuple[type[Message], bytes]] = {
    "unknown": (pb.Revision, UNKNOWN + b"\x08\x01" + UNKNOWN + b"\x10\x02" + UNKNOWN),
    "another wire type": (pb.Revision, tag(1, 2) + b"\x01\x05" + tag(2, 0) + b"\x07"),
    "packed or not": (
        pb.Column, tag(3, 0) + b"\x05" + tag(3, 2) + b"\x02\x06\x07" + tag(3, 0) + b"\x08"
    ),
    "packed nothing": (pb.Column, tag(5, 2) + b"\x00"),
    "the last of a oneof": (pb.Value, tag(2, 0) + b"\x01" + tag(3, 0) + b"\x03"),
    "a message twice": (
        pb.Value, tag(7, 2) + b"\x04\x0a\x02\x10\x01" + tag(7, 2) + b"\x02\x10\x01"
    ),
    "a message, another, and it again": (
        pb.Value, tag(7, 2) + b"\x02\x10\x01" + tag(5, 2) + b"\x01a" + tag(7, 2) + b"\x00"
    ),
    "a number twice": (pb.Revision, tag(1, 0) + b"\x01" + tag(1, 0) + b"\x02"),
    "a number of over 32 bits": (pb.Replica, tag(1, 0) + b"\xff" * 4 + b"\x1f"),
    "a map's defaults": (pb.Tags, b"\x0a\x00"),
    "a key twice": (pb.Tags, b"\x0a\x03\x0a\x01a" + b"\x0a\x07\x12\x02\x10\x01\x0a\x01a"),
    "an unknown enum value": (pb.GetPutProgressResponse, tag(1, 0) + b"\x80\x80\x80\x80\x08"),
    "a bool of two bytes": (pb.Request, tag(4, 0) + b"\x80\x01"),
}  # fmt: skip


def test_other_bytes_of_the_same_are_read_alike() -> None:
    cases = [{"type": cls.DESCRIPTOR.name, "bytes": data.hex()} for cls, data in VARIANTS.values()]
    for found, (case, (cls, data)) in zip(outcomes(cases), VARIANTS.items(), strict=True):
        assert in_order(found.get("object")) == told(cls.FromString(data)), (case, found)


def nested(levels: int) -> bytes:
    """A value of so many lists in each other."""
    data = b""
    for _ in range(levels):
        item = b"\x0a" + _size(len(data)) + data
        data = b"\x3a" + _size(len(item)) + item
    return data


def _size(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


MALFORMED = {
    "cut number": ("Revision", b"\x08\x80"),
    "cut bytes": ("Chunk", b"\x12\x05ab"),
    "huge length": ("Chunk", b"\x12" + b"\xff" * 9 + b"\x01"),
    "cut fixed": ("Value", b"\x21\x00\x00"),
    "long number": ("Revision", b"\x08" + b"\xff" * 10 + b"\x01"),
    "number 0": ("Revision", b"\x00\x01"),
    "wire type 7": ("Revision", b"\x0f"),
    "end of no group": ("Revision", b"\x7c"),
    "open group": ("Revision", b"\x7b\x08\x01"),
    "no text": ("Value", b"\x2a\x01\xff"),
    "deep": ("Value", nested(60)),
    "deep groups": ("Value", b"\x7b" * 200_000),
}


def test_bytes_that_are_no_message_are_refused() -> None:
    cases = [{"type": name, "bytes": data.hex()} for name, data in MALFORMED.values()]
    for found, (case, (name, data)) in zip(outcomes(cases), MALFORMED.items(), strict=True):
        with pytest.raises(Exception):  # noqa: B017, PT011 - its class differs by implementation
            TYPES[name].FromString(data)
        assert found.get("error", "").startswith("MalformedMessage: "), (case, found)


def test_as_deep_as_protobuf_reads_is_read() -> None:
    data = nested(30)
    (found,) = outcomes([{"type": "Value", "bytes": data.hex()}])
    assert found["object"] == told(pb.Value.FromString(data))


def number(value: float) -> dict[str, str]:
    return {"$": "f", "v": struct.pack(">d", value).hex()}


def big(value: int) -> dict[str, str]:
    return {"$": "n", "v": str(value)}


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("Trajectory", {"uid": number(1)}, "Trajectory.uid: a string is due, not number 1"),
    ("Trajectory", {"input_ids": [number(1.5)]}, "integer of 32 bits is due, not number 1.5"),
    ("Trajectory", {"input_ids": [number(2**31)]}, "an integer of 32 bits is due"),
    ("Trajectory", {"labels": [big(3)]}, "an integer of 32 bits is due, not bigint 3"),
    ("Trajectory", {"logprobs": ["1"]}, "a number is due, not string 1"),
    ("Trajectory", {"policy_spans": [{"version": number(2**60)}]}, "Span.version: a BigInt"),
    ("Trajectory", {"tokens": []}, "Trajectory has no field tokens"),
    ("Trajectory", {"tags": "x"}, "Trajectory.tags: Tags: an object is due"),
    ("Revision", {"n": big(2**63)}, "an integer of 64 bits is due"),
    ("Request", {"retry": number(1)}, "true or false is due"),
    ("Request", {"client_id": "a\ud800"}, "half a surrogate pair is no text"),
    ("Chunk", {"data": "00"}, "a Uint8Array is due"),
    ("Value", {"bool_value": True, "int_value": big(1)}, "Value: one of null_value, bool"),
]


def test_objects_that_are_no_message_are_refused() -> None:
    cases = [{"type": name, "object": object_} for name, object_, _ in UNFIT]
    for found, (_, _, said) in zip(outcomes(cases), UNFIT, strict=True):
        assert found.get("error", "").startswith("MalformedMessage: "), (said, found)
        assert said in found["error"]


# -- the generated file ---------------------------------------------------------------------------


def test_the_generated_file_is_of_the_present_protocol() -> None:
    spec = importlib.util.spec_from_file_location("node_generate", EXAMPLE / "generate.py")
    assert spec
    assert spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (EXAMPLE / "dataplane.mjs").read_text() == generate.generated(), "run generate.py"
