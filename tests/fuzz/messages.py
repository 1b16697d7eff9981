"""Messages of protobuf as trees of fields: filled, changed and planted by reflection. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import Message

_ODD: dict[int, tuple[Any, ...]] = {
    Kind.CPPTYPE_INT32: (0, 1, 2, -1, -100, 65_536, (1 << 31) - 1, -(1 << 31)),
    Kind.CPPTYPE_INT64: (0, 1, 5, -1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)),
    Kind.CPPTYPE_UINT32: (0, 1, (1 << 32) - 1),
    Kind.CPPTYPE_UINT64: (0, 1, (1 << 64) - 1),
    Kind.CPPTYPE_DOUBLE: (0.0, 1.5, -1.0, float("nan"), float("inf"), 1e308),
    Kind.CPPTYPE_FLOAT: (0.0, -0.5, -1.0, 1.0, float("nan"), float("-inf"), 1e-30),
    Kind.CPPTYPE_BOOL: (False, True),
    Kind.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 99, -1),
    Kind.CPPTYPE_STRING: (
        "", "a", "p", "x", "object", "int64", "bfloat16", "in", "and", "not", "\0", "..", "é" * 99,
        "dataplane.lost", "uid", "x" * 300,
    ),
}  # fmt: skip
_ODD_BYTES = (b"", b"\0", b"\xff" * 8, b"\x08\x01", bytes(64))


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _scalar(field: Any, chance: random.Random) -> Any:
    if field.type == Kind.TYPE_BYTES:
        return chance.choice(_ODD_BYTES)
    return chance.choice(_ODD[field.cpp_type])


def filled(message: Message, depth: int = 2) -> Message:
    """The message with something plausible in every field that is not one of several."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and field.containing_oneof.fields[0] is not field:
            continue
        value: Any = getattr(message, field.name)
        if _is_map(field):
            inner = field.message_type.fields_by_name["value"]
            if inner.message_type is None:
                value["a"] = _ODD[inner.cpp_type][1]
            elif depth:
                filled(value["a"], depth - 1)
        elif field.is_repeated:
            if field.message_type is None:
                value.append(b"b" if field.type == Kind.TYPE_BYTES else _ODD[field.cpp_type][1])
            elif depth:
                filled(value.add(), depth - 1)
        elif field.message_type is not None:
            if depth:
                filled(value, depth - 1)
        else:
            one = b"b" if field.type == Kind.TYPE_BYTES else _ODD[field.cpp_type][1]
            setattr(message, field.name, one)
    return message


def mutate(message: Any, chance: random.Random, depth: int = 0) -> None:
    """Change something in the message, or in one that it has."""
    field = chance.choice(message.DESCRIPTOR.fields)
    if chance.random() < 0.6:  # rather what is there already
        there = [field for field, _ in message.ListFields()]
        field = chance.choice(there) if there else field
    value = getattr(message, field.name)
    deeper = depth < 20 and chance.random() < 0.7
    if _is_map(field):
        _mutate_map(field, value, chance, depth, deeper=deeper)
    elif field.is_repeated:
        _mutate_list(field, value, chance, depth, deeper=deeper)
    elif field.message_type is not None:
        if deeper:
            mutate(value, chance, depth + 1)
        elif chance.random() < 0.5:
            message.ClearField(field.name)
        else:
            value.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, chance))


def _mutate_map(field: Any, value: Any, chance: random.Random, depth: int, *, deeper: bool) -> None:
    inner = field.message_type.fields_by_name["value"]
    keys = list(value)
    if keys and chance.random() < 0.2:
        del value[chance.choice(keys)]
        return
    key = (
        chance.choice(keys)
        if keys and chance.random() < 0.6
        else chance.choice(_ODD[Kind.CPPTYPE_STRING])
    )
    if inner.message_type is None:
        value[key] = _scalar(inner, chance)
    elif deeper:
        mutate(value[key], chance, depth + 1)
    else:
        value[key].SetInParent()


def _mutate_list(
    field: Any, value: Any, chance: random.Random, depth: int, *, deeper: bool
) -> None:
    at = chance.randrange(len(value)) if len(value) else 0
    how = chance.randrange(4)
    if len(value) and how == 0:
        del value[at]
    elif field.message_type is not None:
        if len(value) and deeper:
            mutate(value[at], chance, depth + 1)
        elif len(value) and how == 1:
            value.add().CopyFrom(value[at])
        else:
            mutate(value.add(), chance, depth + 1)
    elif len(value) and how == 1:
        value.extend([value[at]] * chance.choice((1, 2, 5)))
    elif len(value) and how == 2:
        value[at] = _scalar(field, chance)
    else:
        value.append(_scalar(field, chance))


def planted(message: Any, payload: bytes, depth: int = 0) -> Iterator[None]:
    """Put the bytes in the place of one field after the other; the message is as before when it is
    asked for the next. Text takes them as Latin 1."""
    text = payload.decode("latin-1")
    for field in message.DESCRIPTOR.fields:
        if field.type not in (Kind.TYPE_BYTES, Kind.TYPE_STRING, Kind.TYPE_MESSAGE):
            continue
        by = payload if field.type == Kind.TYPE_BYTES else text
        before = type(message)()
        before.CopyFrom(message)
        value = getattr(message, field.name)
        if _is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                value[text].SetInParent()
                yield
                for key in list(value) if depth < 4 else ():
                    yield from planted(value[key], payload, depth + 1)
        elif field.message_type is not None:
            if depth < 4:
                inner = value.add() if field.is_repeated else value
                yield from planted(inner, payload, depth + 1)
        elif field.is_repeated:
            value.append(by)
            yield
        else:
            setattr(message, field.name, by)
            yield
        message.CopyFrom(before)
