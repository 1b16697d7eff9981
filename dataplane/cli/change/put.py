"""`dataplane put`: tags and fields of one key, from the command line and from files."""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer

from dataplane.cli.output import Output, OutputOption, print_record
from dataplane.cli.reach import (
    AddressOption,
    KeyArgument,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import bytes_text, visible
from dataplane.errors import InvalidRequest


def put(
    partition: PartitionArgument,
    key: KeyArgument,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag", "-t", metavar="TAG", help="NAME=TEXT, or NAME:=JSON; may be repeated."
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", "-f", metavar="FIELD", help="NAME=@FILE or NAME=JSON; may be repeated."
        ),
    ] = None,
    must_exist: Annotated[
        bool, typer.Option("--must-exist", help="Refuse a key that is not there.")
    ] = False,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Refuse a key that is there.")
    ] = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write tags and fields of one key.

    At one revision: all of it or nothing. A file is .npy, .npz, .safetensors (FILE:ENTRY of
    several), .json or .txt; none is unpickled. JSON numbers become a tensor where the partition or
    dataplane.fields knows the field's dtype, else they are kept as a Python value.

    Example: dataplane put train u7_0_0 --tag status=completed --tag score:=0.5
    --field 'input_ids=[1,2,3]'
    """
    tags = dict(_tag(text) for text in tag or ())
    given = dict(_split(text, "--field") for text in field or ())
    if not tags and not given:
        raise InvalidRequest("say what to put, with --tag or --field")
    if must_exist and if_absent:
        raise InvalidRequest("--must-exist and --if-absent contradict each other")
    read = {field_name: _read(text) for field_name, text in given.items()}
    with reached(address, name, ray, timeout) as client:
        schema = {}
        if any(not of_file for of_file, _ in read.values()):
            schema = client.kv_list_partitions().get(partition, {}).get("schema", {})
        fields = {
            field_name: value if of_file else _typed(field_name, value, schema)
            for field_name, (of_file, value) in read.items()
        }
        meta = client.kv_put(
            key, partition, fields, tags,
            must_exist=must_exist, if_absent=if_absent, return_tags=True,
        )  # fmt: skip
    record: dict[str, Any] = {
        "partition_id": partition,
        "key": key,
        "revision": meta.revision,
        "tags": meta.tags[0],
        "fields": [_about(field_name, value) for field_name, value in fields.items()],
    }

    def show() -> None:
        revision = meta.revision
        typer.echo(f"{visible(key)} is written, at revision {revision.n if revision else '-'}")
        for of in record["fields"]:
            sized = "" if of["bytes"] is None else f" {of['shape']} {bytes_text(of['bytes'])}"
            typer.echo(f"  {visible(of['name'])}: {of['dtype']}{sized}")

    print_record(record, output, show)


def _split(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"{option} {text!r:.80} is no NAME=VALUE")
    return name, value


def _tag(text: str) -> tuple[str, Any]:
    name, value = _split(text, "--tag")
    if not name.endswith(":"):
        return name, value
    try:
        return name[:-1], json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"--tag {text!r:.80}: what follows := is no JSON ({error}); for text use ="
        ) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _read(text: str) -> tuple[bool, Any]:
    """Whether a value is a file's, and the value."""
    from dataplane.cli.values.plain_values import from_text
    from dataplane.cli.values.value_files import value_of_file

    if text.startswith("@"):
        value = value_of_file(text[1:])
        return hasattr(value, "dtype"), value
    return False, from_text(text)


def _typed(name: str, value: Any, schema: Any) -> Any:
    """JSON numbers as the tensor that the field wants; any other value as it is."""
    from dataplane.codec.shapes import OBJECT
    from dataplane.fields import KNOWN_FIELDS

    known = schema[name].dtype if name in schema else None
    if known is None and name in KNOWN_FIELDS:
        known = KNOWN_FIELDS[name].dtype
    if known is None or known == OBJECT or hasattr(value, "dtype"):
        return value
    return _tensor(name, value, known)


def _tensor(name: str, value: Any, dtype: str) -> Any:
    import torch

    from dataplane.codec.dtypes import dtype_of

    of = dtype_of(dtype)
    try:
        tensor: Any = torch.tensor(value, dtype=of)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRequest(f"field {name!r} is {dtype}, and the JSON is not: {error}") from None
    # torch cuts fractions off and wraps what is too large.
    if not of.is_floating_point and not of.is_complex and _unequal(tensor.tolist(), value):
        raise InvalidRequest(f"field {name!r} is {dtype}, which cannot hold all of the numbers")
    return tensor


def _unequal(kept: Any, given: Any) -> bool:
    if isinstance(given, list):
        pairs = zip(cast("list[Any]", kept), cast("list[Any]", given), strict=True)
        return any(_unequal(one, other) for one, other in pairs)
    return kept != given or isinstance(kept, bool) is not isinstance(given, bool)


def _about(name: str, value: Any) -> dict[str, Any]:
    if not hasattr(value, "dtype"):
        return {"name": name, "dtype": "object", "shape": None, "bytes": None}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(value.shape), "bytes": value.nbytes}
