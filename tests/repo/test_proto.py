"""The outside protocol: how it is written, whether its code is fresh, and what may change."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

from dataplane.v1 import dataplane_pb2 as pb
from tests.repo.proto_changes import breaking
from tests.repo.proto_lint import problems
from tests.repo.tree import ROOT

PROTO = ROOT / "proto"
SOURCE = PROTO / "dataplane" / "v1" / "dataplane.proto"
RELEASED = SOURCE.with_name("released.binpb")
GENERATED = ROOT / "dataplane" / "v1"


@cache
def written() -> FileDescriptorProto:
    """The protocol as its source says, with its comments."""
    return compiled(SOURCE, PROTO)


def compiled(source: Path, root: Path) -> FileDescriptorProto:
    """What the compiler makes of a file, with its comments."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.binpb"
        flags = ["--include_source_info", f"-I{root}", f"--descriptor_set_out={out}"]
        assert protoc.main(["protoc", *flags, str(source)]) == 0
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def plain(file: FileDescriptorProto) -> FileDescriptorProto:
    """A file's descriptor without where things stand in it."""
    bare = FileDescriptorProto.FromString(file.SerializeToString())
    bare.ClearField("source_code_info")
    return bare


def released() -> FileDescriptorProto:
    """The protocol as it was released."""
    (file,) = FileDescriptorSet.FromString(RELEASED.read_bytes()).file
    return file


# -- generated code -------------------------------------------------------------------------------


def test_there_is_one_protocol() -> None:
    assert [path.relative_to(PROTO) for path in PROTO.rglob("*.proto")] == [
        SOURCE.relative_to(PROTO)
    ]


def test_the_generated_code_is_of_this_protocol() -> None:
    generated = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    bare = plain(written())
    for message in bare.message_type:
        _drop_json_names(message)
    for message in generated.message_type:
        _drop_json_names(message)
    assert generated == bare, "make proto"


def _drop_json_names(message: DescriptorProto) -> None:
    """They follow from the names; some versions of the compiler leave them out."""
    for its in message.field:
        its.ClearField("json_name")
    for inner in message.nested_type:
        _drop_json_names(inner)


def test_the_generated_types_are_of_this_protocol() -> None:
    tree = ast.parse((GENERATED / "dataplane_pb2.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for message in written().message_type:
        named = {
            item.target.id
            for item in classes.pop(message.name).body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        fields = {its.name for its in message.field}
        assert {name for name in named if not name.isupper()} == fields, message.name
    assert set(classes) == {enum.name for enum in written().enum_type}
    values = {
        item.target.id
        for item in tree.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assert {value.name for enum in written().enum_type for value in enum.value} <= values


def test_the_generated_stubs_are_of_this_protocol() -> None:
    text = (GENERATED / "dataplane_pb2_grpc.py").read_text()
    (service,) = written().service
    kinds = {
        (False, False): "unary_unary", (False, True): "unary_stream",
        (True, False): "stream_unary", (True, True): "stream_stream",
    }  # fmt: skip
    due = {
        (method.name, kinds[method.client_streaming, method.server_streaming])
        for method in service.method
    }
    found = re.findall(
        rf"self\.(\w+) = channel\.(\w+)\(\s*'/{written().package}\.{service.name}/\1'", text
    )
    assert set(found) == due


# -- how it is written ----------------------------------------------------------------------------


def test_the_protocol_keeps_the_rules() -> None:
    assert not problems(written())


GOOD = """
syntax = "proto3";
package shop.v1;
service ShopService {
  // Sells.
  rpc Sell(SellRequest) returns (SellResponse);
}
message SellRequest {
  map<string, int32> how_many = 1;
  oneof pay_with { string card = 2; bool cash = 3; }
  optional int32 tip = 4;
}
message SellResponse { SellState state = 1; }
enum SellState { SELL_STATE_UNSPECIFIED = 0; SELL_STATE_SOLD = 1; }
"""


def sketched(folder: Path, text: str, name: str = "shop/v1/shop.proto") -> FileDescriptorProto:
    """What the compiler makes of a text."""
    source = folder / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    return compiled(source, folder)


def test_a_file_that_keeps_the_rules(tmp_path: Path) -> None:
    assert problems(sketched(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("package shop.v1", "package shop.v2", "package shop.v2 is not its folder"),
        ("package shop.v1", "package shop", "does not end with a version"),
        ('"proto3"', '"proto2"', "its syntax is proto2"),
        ("ShopService", "Shop", "service Shop: a name is PascalCase and ends"),
        ("rpc Sell(", "rpc sell(", "rpc ShopService.sell: a name"),
        ("rpc Sell(", "rpc Buy(", "SellRequest, not a BuyRequest of its own"),
        ("returns (SellResponse)", "returns (SellRequest)", "SellRequest is of 2 calls"),
        ("// Sells.", "", "rpc ShopService.Sell: no comment"),
        ("// Sells.", "// sells", "rpc ShopService.Sell: no comment"),
        ("SellRequest", "sell_request", "message sell_request: a name is PascalCase"),
        ("how_many", "howMany", "field SellRequest.howMany"),
        ("pay_with", "payWith", "oneof SellRequest.payWith"),
        ("SellState", "sell_state", "enum sell_state: a name is PascalCase"),
        ("SELL_STATE_SOLD", "SOLD", "SOLD is not SELL_STATE_UPPER_SNAKE_CASE"),
        ("SELL_STATE_UNSPECIFIED", "SELL_STATE_NONE", "its zero is SELL_STATE_NONE"),
        (
            "enum SellState {",
            "enum SellState { option allow_alias = true; SELL_STATE_X = 0;",
            "two names of one number",
        ),
        (
            "message SellResponse {",
            "message SellResponse { enum Deep { NO = 0; } message deep { int32 A = 1; }",
            "field SellResponse.deep.A",
        ),
        ("message SellResponse {", "message SellResponse { enum In { NO = 0; }", "In: its zero"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_told(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new)
    if "proto2" in new:  # where every field says whether it is due
        text = text.replace("SellState state", "optional SellState state")
    found = problems(sketched(tmp_path, text))
    assert any(said in problem for problem in found), found


def test_a_name_of_a_file_is_lower_snake_case(tmp_path: Path) -> None:
    (found,) = problems(sketched(tmp_path, GOOD, "shop/v1/Shop.proto"))
    assert "the name of a file" in found


# -- what may change ------------------------------------------------------------------------------


def test_what_was_released_still_holds() -> None:
    assert not breaking(released(), plain(written()))


def test_a_protocol_breaks_nothing_of_itself() -> None:
    assert not breaking(plain(written()), plain(written()))
    assert not breaking(released(), released())


Change = Callable[[FileDescriptorProto], object]


def message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(one for one in file.message_type if one.name == name)


def field(file: FileDescriptorProto, name: str, its: str) -> FieldDescriptorProto:
    return next(one for one in message(file, name).field if one.name == its)


def without(named: Any, name: str) -> None:
    """Remove what has this name from a repeated field."""
    named.remove(next(one for one in named if one.name == name))


def reserve(file: FileDescriptorProto, name: str, its: str, *, number: bool, named: bool) -> None:
    """Take a field away, and reserve what is said."""
    of = message(file, name)
    at = field(file, name, its).number
    without(of.field, its)
    if number:
        of.reserved_range.add(start=at, end=at + 1)
    if named:
        of.reserved_name.append(its)


def swap_numbers(file: FileDescriptorProto) -> None:
    one, other = message(file, "Revision").field
    one.number, other.number = other.number, one.number


BREAKING: dict[str, tuple[Change, str]] = {
    "package": (lambda f: setattr(f, "package", "dataplane.v2"), "package dataplane.v1 became"),
    "message": (lambda f: without(f.message_type, "Row"), "message Row is gone"),
    "map entry": (
        lambda f: without(message(f, "Tags").nested_type, "ValuesEntry"), "message Tags.ValuesEntry"
    ),
    "enum": (lambda f: without(f.enum_type, "PutMode"), "enum PutMode is gone"),
    "service": (lambda f: f.ClearField("service"), "service DataPlaneService is gone"),
    "rpc": (lambda f: without(f.service[0].method, "Claim"), "rpc DataPlaneService.Claim is gone"),
    "request": (
        lambda f: setattr(f.service[0].method[0], "input_type", ".dataplane.v1.Row"),
        "input_type .dataplane.v1.DescribeRequest became .dataplane.v1.Row",
    ),
    "stream": (
        lambda f: setattr(f.service[0].method[0], "server_streaming", True),
        "server_streaming False became True",
    ),
    "number": (swap_numbers, "field 1 of Revision: name epoch became n"),
    "name": (lambda f: setattr(field(f, "Revision", "n"), "name", "m"), "name n became m"),
    "type": (
        lambda f: setattr(field(f, "Revision", "n"), "type", FieldDescriptorProto.TYPE_SINT64),
        "field 2 of Revision: type 3 became 18",
    ),
    "type name": (
        lambda f: setattr(field(f, "Request", "seen"), "type_name", ".dataplane.v1.Row"),
        "type_name .dataplane.v1.Revision became",
    ),
    "label": (
        lambda f: setattr(field(f, "Row", "key"), "label", FieldDescriptorProto.LABEL_REPEATED),
        "field 1 of Row: label 1 became 3",
    ),
    "optional": (
        lambda f: field(f, "Trajectory", "reward").ClearField("proto3_optional"),
        "proto3_optional True became False",
    ),
    "into a oneof": (
        lambda f: setattr(field(f, "Trajectory", "uid"), "oneof_index", 0),
        "oneof None became _",
    ),
    "out of a oneof": (
        lambda f: field(f, "Value", "int_value").ClearField("oneof_index"),
        "oneof kind became None",
    ),
    "packed": (
        lambda f: setattr(field(f, "Trajectory", "labels").options, "packed", True),
        "packed became True",
    ),
    "gone": (
        lambda f: reserve(f, "Row", "fields", number=False, named=False), "field 3 of Row, fields,"
    ),
    "gone, name free": (
        lambda f: reserve(f, "Row", "fields", number=True, named=False), "field 3 of Row, fields,"
    ),
    "gone, number free": (
        lambda f: reserve(f, "Row", "fields", number=False, named=True), "field 3 of Row, fields,"
    ),
    "value": (
        lambda f: without(f.enum_type[0].value, "PUT_MODE_IF_ABSENT"), "PUT_MODE_IF_ABSENT of enum"
    ),
    "value's name": (
        lambda f: setattr(f.enum_type[0].value[1], "name", "PUT_MODE_OTHER"),
        "1 of enum PutMode: PUT_MODE_MUST_EXIST became PUT_MODE_OTHER",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BREAKING)
def test_what_breaks_peers_is_told(case: str) -> None:
    change, said = BREAKING[case]
    new = plain(written())
    change(new)
    found = breaking(plain(written()), new)
    assert any(said in problem for problem in found), found


def test_what_is_reserved_stays_so() -> None:
    old = plain(written())
    reserve(old, "Row", "fields", number=True, named=True)
    found = breaking(old, plain(written()))
    assert found == ["message Row: [3] and ['fields'] are not reserved any more"]


def test_what_is_added_or_reserved_breaks_nobody() -> None:
    new = plain(written())
    message(new, "Row").field.add(
        name="more", json_name="more", number=99,
        type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL,
    )  # fmt: skip
    new.message_type.add(name="Extra")
    new.enum_type[0].value.add(name="PUT_MODE_NEW", number=9)
    new.enum_type.add(name="Mood").value.add(name="MOOD_UNSPECIFIED", number=0)
    new.service[0].method.add(
        name="New", input_type=".dataplane.v1.Extra", output_type=".dataplane.v1.Extra"
    )
    reserve(new, "Row", "fields", number=True, named=True)
    states = new.enum_type[1]
    gone = states.value.pop()
    states.reserved_range.add(start=gone.number, end=gone.number)
    states.reserved_name.append(gone.name)
    assert breaking(plain(written()), new) == []
