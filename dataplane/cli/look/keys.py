"""`dataplane keys`: the rows of a partition that match, with the tags that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.names import names_of
from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.since import SinceOption, revision_text, since_of
from dataplane.cli.where import WhereOption, parse_where

if TYPE_CHECKING:
    from dataplane.client.results import Listing

USUAL = ("status", "uid", "seq_len", "global_steps", "score", "error_msg")
"""Tags that a table shows of rows that have them, where nobody says which."""

ColumnsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        "-c",
        help="Tags to show: a,b,c; all in JSON, the usual in tables.",
        metavar="TAGS",
    ),
]
SortOption = Annotated[
    str | None,
    typer.Option("--sort", "-s", help="By this tag; -TAG for the largest first.", metavar="TAG"),
]
LimitOption = Annotated[int | None, typer.Option("--limit", "-n", help="At most so many.", min=0)]


def keys(
    partition_id: PartitionArgument,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    sort: SortOption = None,
    limit: LimitOption = 1000,
    since: SinceOption = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List keys with their tags.

    With --since the rows that changed after that, and the keys cleared since, whose `cleared` is
    true. The line on standard error says the revision, which --since takes.

    Example: dataplane keys train --where 'status=completed,seq_len>=100' --sort -seq_len --limit 20
    """
    names = names_of(columns, "--columns")
    ordered: dict[str, Any] = {} if sort is None else {"order_by": sort}
    with reached(address, name, ray, timeout) as client:
        listing = client.kv_list(
            partition_id,
            where=parse_where(where),
            since=since_of(since, client),
            columns=names,
            limit=limit,
            **ordered,
        )
    rows = [_row(*row) for row in zip(listing.keys, listing.fields, listing.tags, strict=True)]
    rows += [{"key": key, "cleared": True, "fields": [], "tags": {}} for key in listing.cleared]
    if output in (Output.TABLE, Output.CSV):
        shown = _shown(listing) if names is None and output is Output.TABLE else names
        _print_flat(rows, shown or listing.tag_names, output, with_cleared=since is not None)
    else:
        print_rows(rows, (), output)
    cut = " (--limit cut it short)" if limit is not None and len(listing) == limit else ""
    count = "1 key" if len(listing) == 1 else f"{len(listing):,} keys"
    typer.echo(f"{count} at revision {revision_text(listing.revision)}{cut}", err=True)


def _row(key: str, fields: Sequence[str], tags: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": key,
        "cleared": False,
        "fields": list(fields),
        "tags": dict(sorted(tags.items())),
    }


def _shown(listing: Listing) -> list[str]:
    """The tags that a table has room for."""
    there = listing.tag_names
    return [name for name in USUAL if name in there] or there[:4]


def _print_flat(
    rows: list[dict[str, Any]], names: Sequence[str], output: Output, *, with_cleared: bool
) -> None:
    """Rows with a column for each tag."""
    columns = [Column("key"), *([Column("cleared")] if with_cleared else [])]
    columns += [Column(f"tag:{name}", name.upper()) for name in names]
    flat = [
        {
            "key": row["key"],
            **({"cleared": row["cleared"]} if with_cleared else {}),
            **{f"tag:{name}": row["tags"].get(name) for name in names},
        }
        for row in rows
    ]
    print_rows(flat, columns, output, empty="no key matches")
