"""What a file of the outside protocol looks like: names, numbers and comments. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

VERSIONED = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\.v[1-9][0-9]*")
PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")

_SERVICES, _METHODS = 6, 2
"""Numbers of `FileDescriptorProto.service` and `ServiceDescriptorProto.method`: places of comments
are paths of those."""


def problems(file: FileDescriptorProto) -> list[str]:
    """Every rule that a file breaks, in words. Comments are checked if it has source info."""
    found = list(_of_file(file))
    for name, message in _messages(file):
        found += _of_message(name, message)
    for name, enum in _enums(file):
        found += _of_enum(name, enum)
    for service in file.service:
        found += _of_service(service, file.package)
    if file.HasField("source_code_info"):
        found += _of_comments(file)
    return found


def _of_file(file: FileDescriptorProto) -> Iterator[str]:
    folder, _, name = file.name.rpartition("/")
    if file.package != folder.replace("/", "."):
        yield f"{file.name}: package {file.package} is not its folder"
    if not VERSIONED.fullmatch(file.package):
        yield f"{file.name}: package {file.package} does not end with a version"
    if not LOWER_SNAKE.fullmatch(name.removesuffix(".proto")):
        yield f"{file.name}: the name of a file is lower_snake_case"
    if file.syntax != "proto3":
        yield f"{file.name}: its syntax is {file.syntax or 'proto2'}, not proto3"
    if file.public_dependency or file.weak_dependency:
        yield f"{file.name}: a public or weak import"


def _of_message(name: str, message: DescriptorProto) -> Iterator[str]:
    if not PASCAL.fullmatch(message.name):
        yield f"message {name}: a name is PascalCase"
    for its in message.field:
        if not LOWER_SNAKE.fullmatch(its.name):
            yield f"field {name}.{its.name}: a name is lower_snake_case"
    for oneof in message.oneof_decl:
        if not LOWER_SNAKE.fullmatch(oneof.name.removeprefix("_")):
            yield f"oneof {name}.{oneof.name}: a name is lower_snake_case"


def _of_enum(name: str, enum: EnumDescriptorProto) -> Iterator[str]:
    if not PASCAL.fullmatch(enum.name):
        yield f"enum {name}: a name is PascalCase"
    if enum.options.allow_alias:
        yield f"enum {name}: two names of one number"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    for value in enum.value:
        if not value.name.startswith(prefix) or not UPPER_SNAKE.fullmatch(value.name):
            yield f"enum {name}: {value.name} is not {prefix}UPPER_SNAKE_CASE"
    if enum.value[0].number != 0 or enum.value[0].name != f"{prefix}UNSPECIFIED":
        yield f"enum {name}: its zero is {enum.value[0].name}, not {prefix}UNSPECIFIED"


def _of_service(service: ServiceDescriptorProto, package: str) -> Iterator[str]:
    if not PASCAL.fullmatch(service.name) or not service.name.endswith("Service"):
        yield f"service {service.name}: a name is PascalCase and ends with Service"
    for method in service.method:
        where = f"rpc {service.name}.{method.name}"
        if not PASCAL.fullmatch(method.name):
            yield f"{where}: a name is PascalCase"
        for due, given in (("Request", method.input_type), ("Response", method.output_type)):
            if given != f".{package}.{method.name}{due}":
                yield f"{where}: it has {given}, not a {method.name}{due} of its own"
    used = Counter(
        kind for method in service.method for kind in (method.input_type, method.output_type)
    )
    for kind, times in used.items():
        if times > 1:
            yield f"service {service.name}: {kind} is of {times} calls"


def _of_comments(file: FileDescriptorProto) -> Iterator[str]:
    said = {
        tuple(place.path): place.leading_comments.strip()
        for place in file.source_code_info.location
    }
    for i, service in enumerate(file.service):
        for k, method in enumerate(service.method):
            comment = said.get((_SERVICES, i, _METHODS, k), "")
            if not comment.endswith("."):
                yield f"rpc {service.name}.{method.name}: no comment in sentences before it"


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    """Every message that somebody wrote, by its name in the package."""
    todo = [(message.name, message) for message in file.message_type]
    while todo:
        name, message = todo.pop(0)
        if message.options.map_entry:
            continue
        yield name, message
        todo += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def _enums(file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for enum in file.enum_type:
        yield enum.name, enum
    for name, message in _messages(file):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum
