"""`dataplane stats`: what a partition is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.output import (
    Column,
    Output,
    OutputOption,
    print_record,
    print_rows,
    print_table,
    width,
)
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import (
    ABSENT,
    age_text,
    bytes_text,
    client_text,
    count_text,
    histogram,
    share_text,
    visible,
)
from dataplane.errors import FieldNotFound

if TYPE_CHECKING:
    from dataplane.inspection import PartitionStats

BYTES = Column("bytes", "BYTES", bytes_text, right=True)
ROWS = Column("rows", "ROWS", count_text, right=True)
SHARE = Column("share", right=True)

FIELDS = (Column("field"), ROWS, BYTES, SHARE)
STATUSES = (Column("status"), ROWS, SHARE)
PRODUCERS = (Column("label", "PRODUCER"), Column("alive"), ROWS, BYTES)
AGES = (Column("age", "LAST CHANGED"), ROWS, BYTES)


def stats(
    partition_id: PartitionArgument,
    field: Annotated[
        str | None, typer.Option(help="Show the lengths of this field.", metavar="NAME")
    ] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a partition is made of: bytes, ages, lengths.

    Bytes by field, producer and time of the last change; rows by status; a histogram of lengths.
    As csv: the fields.

    Example: dataplane stats train
    """
    with reached(address, name, ray, timeout) as client:
        found = client.stats(partition_id)
    if field is not None and field not in found.lengths:
        raise FieldNotFound(
            f"partition {partition_id!r} has no lengths of a field {field!r:.80}; it has those of "
            f"{', '.join(map(repr, found.lengths)) or 'none'}",
            partition_id=partition_id,
            fields=[field],
        )
    if output is Output.CSV:
        print_rows(_fields(found), FIELDS[:3], output)
    else:
        print_record(asdict(found), output, lambda: _show(found, field))


def _show(found: PartitionStats, field: str | None) -> None:
    typer.echo(
        f"{visible(found.partition_id)}: {count_text(found.keys)} keys, "
        f"{bytes_text(found.payload_bytes)} of values in {bytes_text(found.extent_bytes)} of "
        f"extents, {bytes_text(found.tag_bytes)} of tags"
    )
    if found.held_bytes:
        typer.echo(f"{bytes_text(found.held_bytes)} are kept for open groups")
    _table(_fields(found), FIELDS)
    statuses = [
        {"status": status or ABSENT, "rows": rows, "share": share_text(rows, found.keys)}
        for status, rows in found.statuses.items()
    ]
    _table(statuses, STATUSES)
    _table(
        [{**e, "label": client_text(e["label"], e["client_id"])} for e in found.producers],
        PRODUCERS,
    )
    _table(
        [
            {**each, "age": _span(each["from_s"], each["to_s"])}
            for each in found.ages
            if each["rows"]
        ],
        AGES,
    )
    for names, lengths in _lengths(found, field):
        typer.echo(f"\nlengths of {visible(', '.join(names))}")
        typer.echo(
            f"{count_text(lengths['rows'])} rows, {lengths['min']} to {lengths['max']}, "
            f"mean {lengths['mean']:.1f}; half up to {lengths['p50']}, 90 % to "
            f"{lengths['p90']}, 99 % to {lengths['p99']}"
        )
        for line in histogram(lengths["histogram"], min(width(), 80)):
            typer.echo(line)


def _table(rows: list[dict[str, Any]], columns: tuple[Column, ...]) -> None:
    if rows:
        typer.echo("")
        print_table(rows, columns)


def _fields(found: PartitionStats) -> list[dict[str, Any]]:
    return [
        {"field": name, **each, "share": share_text(each["bytes"], found.payload_bytes)}
        for name, each in found.fields.items()
    ]


def _lengths(found: PartitionStats, field: str | None) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Lengths to show, with the fields that have them: most fields of a row are as long."""
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    for name, report in found.lengths.items():
        if field not in (None, name):
            continue
        lengths = asdict(report)
        same = next((names for names, of in groups if of == lengths), None)
        if same is None:
            groups.append(([name], lengths))
        else:
            same.append(name)
    return groups


def _span(from_s: float, to_s: float | None) -> str:
    if to_s is None:
        return f"over {age_text(from_s)} ago"
    return (
        f"{age_text(from_s)} to {age_text(to_s)} ago" if from_s else f"under {age_text(to_s)} ago"
    )
