"""What of a released protocol a later file has changed in a way that its peers would notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)


def breaking(old: FileDescriptorProto, new: FileDescriptorProto) -> list[str]:
    """Every change that is not an addition, in words.

    What is taken away stays reserved, number and name, so that neither is given a new meaning.
    """
    found: list[str] = []
    for what in ("package", "syntax"):
        if getattr(old, what) != getattr(new, what):
            found.append(f"{what} {getattr(old, what)} became {getattr(new, what)}")
    found += _of_types("", old, new)
    services = {service.name: service for service in new.service}
    for service in old.service:
        if service.name not in services:
            found.append(f"service {service.name} is gone")
            continue
        methods = {method.name: method for method in services[service.name].method}
        for method in service.method:
            if method.name not in methods:
                found.append(f"rpc {service.name}.{method.name} is gone")
            else:
                parts = ("input_type", "output_type", "client_streaming", "server_streaming")
                place = f"rpc {service.name}.{method.name}"
                found += _differ(place, parts, method, methods[method.name])
    return found


def _of_types(
    prefix: str,
    old: FileDescriptorProto | DescriptorProto,
    new: FileDescriptorProto | DescriptorProto,
) -> Iterator[str]:
    messages = {message.name: message for message in _messages(new)}
    for message in _messages(old):
        name = prefix + message.name
        if message.name not in messages:
            yield f"message {name} is gone"
        else:
            yield from _of_message(name, message, messages[message.name])
    enums = {enum.name: enum for enum in new.enum_type}
    for enum in old.enum_type:
        if enum.name not in enums:
            yield f"enum {prefix}{enum.name} is gone"
        else:
            yield from _of_enum(prefix + enum.name, enum, enums[enum.name])


def _messages(of: FileDescriptorProto | DescriptorProto) -> Sequence[DescriptorProto]:
    return of.message_type if isinstance(of, FileDescriptorProto) else of.nested_type


def _of_message(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    yield from _of_types(f"{name}.", old, new)
    fields = {its.number: its for its in new.field}
    reserved = _numbers(new)
    for its in old.field:
        place = f"field {its.number} of {name}"
        if its.number in fields:
            parts = ("name", "json_name", "type", "type_name", "label", "proto3_optional")
            its_new = fields[its.number]
            yield from _differ(place, parts, its, its_new)
            if _oneof(old, its) != _oneof(new, its_new):
                yield f"{place}: oneof {_oneof(old, its)} became {_oneof(new, its_new)}"
            if its.options.packed != its_new.options.packed:
                yield f"{place}: packed became {its_new.options.packed}"
        elif its.number not in reserved or its.name not in new.reserved_name:
            yield f"{place}, {its.name}, is gone, and not both number and name are reserved"
    yield from _unreserved(f"message {name}", _numbers(old) - reserved, old, new)


def _of_enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    reserved = _numbers(new)
    for value in old.value:
        if value.number in values:
            if values[value.number] != value.name:
                yield f"{value.number} of enum {name}: {value.name} became {values[value.number]}"
        elif value.number not in reserved or value.name not in new.reserved_name:
            yield f"{value.name} of enum {name} is gone, and not both number and name are reserved"
    yield from _unreserved(f"enum {name}", _numbers(old) - reserved, old, new)


def _unreserved(
    place: str,
    numbers: set[int],
    old: DescriptorProto | EnumDescriptorProto,
    new: DescriptorProto | EnumDescriptorProto,
) -> Iterator[str]:
    names = set(old.reserved_name) - set(new.reserved_name)
    if numbers or names:
        yield f"{place}: {sorted(numbers)} and {sorted(names)} are not reserved any more"


def _numbers(of: DescriptorProto | EnumDescriptorProto) -> set[int]:
    """What is reserved. Ranges of enums include their end."""
    last = 1 if isinstance(of, EnumDescriptorProto) else 0
    return {n for part in of.reserved_range for n in range(part.start, part.end + last)}


def _oneof(message: DescriptorProto, its: FieldDescriptorProto) -> str | None:
    return message.oneof_decl[its.oneof_index].name if its.HasField("oneof_index") else None


def _differ(place: str, parts: Sequence[str], old: Any, new: Any) -> Iterator[str]:
    for part in parts:
        if getattr(old, part) != getattr(new, part):
            yield f"{place}: {part} {getattr(old, part)} became {getattr(new, part)}"
