"""`dataplane export`: rows of a partition with their tags, as a file that any tool can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dataplane.cli.change.get import FieldsOption
from dataplane.cli.names import names_of
from dataplane.cli.output import Output, OutputOption, print_record
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import bytes_text, count_text, visible
from dataplane.cli.where import WhereOption, parse_where
from dataplane.errors import FieldNotFound, PartitionNotFound, quote

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.types import FieldSchema

KINDS: Final = (".parquet", ".arrow")


def export(
    partition: PartitionArgument,
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file: .parquet or .arrow.")],
    where: WhereOption = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns", "-c", metavar="TAGS", help="Tags, separated by commas; all if not given."
        ),
    ] = None,
    fields: FieldsOption = None,
    no_fields: Annotated[bool, typer.Option("--no-fields", help="Tags only.")] = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write rows to a Parquet or Arrow file.

    Columns: `key`, `tag.NAME` for each tag (int64, float64, bool, string, or JSON text), and
    `field.NAME` with `shape.NAME`, see `dataplane get`. Tags are of one moment; values are read
    batch by batch, so that memory stays small, and rows that go meanwhile are left out.

    Example: dataplane export train --to train.parquet --where status=completed --fields input_ids
    """
    from dataplane.cli.values.exporting import Exporting, as_they_are
    from dataplane.cli.values.row_files import check_path

    check_path(to, KINDS)
    with reached(address, name, ray, timeout) as client:
        schema, may_change = _fields_of(client, partition)
        chosen = [] if no_fields else names_of(fields, "--fields")
        if chosen is not None:
            schema = _chosen(partition, schema, chosen)
        listing = client.kv_list(
            partition, where=parse_where(where), columns=names_of(columns, "--columns")
        )
        if may_change:
            schema = as_they_are(client, listing, schema)
        exporting = Exporting(client, listing, schema)
        exporting.write(to)
    record: dict[str, Any] = {
        "path": str(to),
        "partition_id": partition,
        "revision": listing.revision,
        "rows": exporting.rows,
        "left_out": len(listing) - exporting.rows,
        "columns": exporting.names,
        "file_bytes": to.stat().st_size,
    }

    def show() -> None:
        typer.echo(
            f"{visible(str(to))}: {count_text(exporting.rows)} rows of {visible(partition)}, "
            f"{len(exporting.names)} columns, {bytes_text(record['file_bytes'])}"
        )
        if record["left_out"]:
            typer.echo(f"{count_text(record['left_out'])} rows went meanwhile and are not in it")

    print_record(record, output, show)


def _fields_of(client: Client, partition: str) -> tuple[dict[str, FieldSchema], bool]:
    """The fields of a partition, and whether they may change. PartitionNotFound without one."""
    found = client.kv_list_partitions()
    if partition not in found:
        raise PartitionNotFound(
            f"there is no partition {quote([partition])}; there are: {quote(sorted(found)) or '-'}",
            partition_id=partition,
        )
    return found[partition]["schema"], found[partition]["open_schema"]


def _chosen(
    partition: str, schema: dict[str, FieldSchema], names: list[str]
) -> dict[str, FieldSchema]:
    missing = [name for name in names if name not in schema]
    if missing:
        raise FieldNotFound(
            f"no row of partition {quote([partition])} has had a field {quote(missing)}; there "
            f"are: {quote(sorted(schema)) or '-'}",
            partition_id=partition,
            fields=missing,
        )
    return {name: schema[name] for name in names}
