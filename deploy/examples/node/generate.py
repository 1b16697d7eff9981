"""Writes dataplane.mjs: the messages of the outside protocol for JavaScript, with their comments.

    python deploy/examples/node/generate.py            # writes the file
    python deploy/examples/node/generate.py --check    # fails if it is not what it should be

Needs grpcio-tools, which is in the `dev` extra. What encodes and decodes is protobuf.mjs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PROTO = HERE.parents[2] / "proto"
SOURCE = "dataplane/v1/dataplane.proto"
TARGET = HERE / "dataplane.mjs"

SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "double", FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_INT64: "int64", FieldDescriptorProto.TYPE_UINT64: "uint64",
    FieldDescriptorProto.TYPE_INT32: "int32", FieldDescriptorProto.TYPE_UINT32: "uint32",
    FieldDescriptorProto.TYPE_SINT32: "sint32", FieldDescriptorProto.TYPE_SINT64: "sint64",
    FieldDescriptorProto.TYPE_BOOL: "bool", FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_BYTES: "bytes", FieldDescriptorProto.TYPE_ENUM: "int32",
}  # fmt: skip
"""The names that protobuf.mjs has for them. KeyError for a type that the protocol does not use."""

_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_PARTS = 2
"""Where comments are: numbers of the descriptors' fields. Fields, values and methods are all 2."""


def generated() -> str:
    """The text of dataplane.mjs."""
    file = _compiled()
    comments = {
        tuple(place.path): place.leading_comments.strip()
        for place in file.source_code_info.location
    }
    lines = [
        f"// Made of proto/{SOURCE} by generate.py. Do not edit.",
        "",
        "import { Message } from './protobuf.mjs';",
    ]
    for i, enum in enumerate(file.enum_type):
        lines += ["", *_enum(enum, (_ENUMS, i), comments)]
    for i, message in enumerate(file.message_type):
        lines += ["", *_message(message, (_MESSAGES, i), comments)]
    for i, service in enumerate(file.service):
        lines += ["", *_service(service, file.package, (_SERVICES, i), comments)]
    return "\n".join(lines) + "\n"


def _compiled() -> FileDescriptorProto:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.binpb"
        flags = ["--include_source_info", f"-I{PROTO}", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *flags, str(PROTO / SOURCE)]):
            raise SystemExit(f"proto/{SOURCE} does not compile")
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


Path_ = tuple[int, ...]
Comments = dict[Path_, str]


def _enum(enum: EnumDescriptorProto, path: Path_, comments: Comments) -> Iterator[str]:
    yield from _comment(comments.get(path, ""))
    yield f"export const {enum.name} = Object.freeze({{"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    for i, value in enumerate(enum.value):
        yield from _comment(comments.get((*path, _PARTS, i), ""), "  ")
        yield f"  {value.name.removeprefix(prefix)}: {value.number},"
    yield "});"


def _message(message: DescriptorProto, path: Path_, comments: Comments) -> Iterator[str]:
    yield from _comment(comments.get(path, ""))
    if not message.field:
        yield f"export const {message.name} = new Message('{message.name}', () => []);"
        return
    oneofs: dict[int, list[str]] = {}
    for its in message.field:
        if its.HasField("oneof_index") and not its.proto3_optional:
            oneofs.setdefault(its.oneof_index, []).append(its.name)
    for index, names in oneofs.items():
        yield f"const {_oneof(message, index)} = {{"
        yield "  oneof: ["
        yield from (f"    '{name}'," for name in names)
        yield "  ],"
        yield "};"
    yield f"export const {message.name} = new Message('{message.name}', () => ["
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    for i, its in enumerate(message.field):
        yield from _comment(comments.get((*path, _PARTS, i), ""), "  ")
        parts = [str(its.number), f"'{its.name}'"]
        entry = entries.get(its.type_name.rpartition(".")[2])
        if entry is not None:
            parts.append(f"[{', '.join(map(_type, entry.field))}]")
        else:
            parts.append(_type(its))
            if its.label == FieldDescriptorProto.LABEL_REPEATED:
                parts.append("'repeated'")
            elif its.proto3_optional:
                parts.append("'optional'")
            elif its.HasField("oneof_index"):
                parts.append(_oneof(message, its.oneof_index))
        yield f"  [{', '.join(parts)}],"
    yield "]);"


def _oneof(message: DescriptorProto, index: int) -> str:
    name = message.oneof_decl[index].name
    return f"{message.name[0].lower()}{message.name[1:]}{name[0].upper()}{name[1:]}"


def _type(its: FieldDescriptorProto) -> str:
    if its.type == FieldDescriptorProto.TYPE_MESSAGE:
        return its.type_name.rpartition(".")[2]
    return f"'{SCALARS[its.type]}'"


def _service(
    service: ServiceDescriptorProto, package: str, path: Path_, comments: Comments
) -> Iterator[str]:
    yield from _comment(comments.get(path, ""))
    yield f"export const {service.name} = Object.freeze({{"
    for i, method in enumerate(service.method):
        yield from _comment(comments.get((*path, _PARTS, i), ""), "  ")
        yield f"  {method.name}: Object.freeze({{"
        yield f"    path: '/{package}.{service.name}/{method.name}',"
        yield f"    request: {method.input_type.rpartition('.')[2]},"
        yield f"    response: {method.output_type.rpartition('.')[2]},"
        yield "  }),"
    yield "});"


def _comment(text: str, indent: str = "") -> Iterator[str]:
    for line in text.splitlines():
        yield f"{indent}// {line.strip()}".rstrip()


def main() -> None:
    """Write the file, or check it."""
    text = generated()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        raise SystemExit(f"{TARGET.name} is not what generate.py makes: run it")


if __name__ == "__main__":
    main()
