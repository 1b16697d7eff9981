"""`dataplane tail`: changes of a partition as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dataplane.cli.output import Column, Output, OutputOption, Stream, reader_left
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    reached,
)
from dataplane.cli.shown import value_text, visible
from dataplane.cli.since import SinceOption, revision_text, since_of
from dataplane.cli.where import WhereOption, parse_where
from dataplane.errors import DeadlineExceeded
from dataplane.types import Change

if TYPE_CHECKING:
    from dataplane.client.sync import Client

LOOK_S: Final = 1.0
"""How long nothing changes until it is looked whether anybody still reads."""
QUIET_S: Final = 60.0
"""How long until it goes on from where the plane is: it may have gone far, and forgets."""

COLUMNS = (
    Column("revision"),
    Column("change"),
    Column("key"),
    Column("tags"),
)


def tail(
    partition_id: PartitionArgument,
    where: WhereOption = None,
    since: SinceOption = None,
    count: Annotated[int | None, typer.Option(help="End after so many lines.", min=1)] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="End after so many seconds without a change.", metavar="SECONDS"),
    ] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Follow a partition: a line for each row put or cleared.

    Until Ctrl-C, --count or --timeout. From now on, or with --since from then on. A row that
    changes several times between two looks is one line, with its tags as they are now. `since`
    of a line is what --since takes to go on after it.

    Example: dataplane tail train --since 1h --count 3 --output json
    """
    lines = Stream(COLUMNS, output)
    left = count
    try:
        with reached(address, name, ray) as client:
            for row in _followed(client, partition_id, since, parse_where(where), timeout):
                lines.print(row, _line(row))
                left = None if left is None else left - 1
                if left == 0:
                    return
    except KeyboardInterrupt:
        return


def _followed(
    client: Client,
    partition_id: str,
    since: str | None,
    where: dict[str, Any] | None,
    timeout_s: float | None,
) -> Iterator[dict[str, Any]]:
    """What changes, until nothing has for so long; without an end where no time is said."""
    now = client.kv_list(partition_id, limit=0).revision  # PartitionNotFound where there is none
    at = since_of(since, client) or now
    changed = caught_up = time.monotonic()
    while not reader_left():
        try:
            watch_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
            for change in client.kv_watch(partition_id, since=at, where=where, timeout=watch_s):
                at = change.revision
                changed = caught_up = time.monotonic()
                yield from _rows(change)
        except DeadlineExceeded:
            if timeout_s is not None and time.monotonic() - changed >= timeout_s:
                return
            if time.monotonic() - caught_up >= QUIET_S:
                missed = client.kv_list(partition_id, where=where, since=at)
                at = missed.revision
                caught_up = time.monotonic()
                yield from _rows(Change(at, missed.to_meta(), missed.cleared, missed.full))


def _rows(change: Change) -> list[dict[str, Any]]:
    since = revision_text(change.revision)
    seen_s = round(time.time(), 3)
    rows: list[dict[str, Any]] = [
        {
            "revision": since,
            "change": "put",
            "key": key,
            "tags": dict(sorted(tags.items())),
            "seen_s": seen_s,
            "full": change.full,
        }
        for key, tags in zip(change.rows.keys, change.rows.tags, strict=True)
    ]
    rows += [
        {
            "revision": since,
            "change": "clear",
            "key": key,
            "tags": {},
            "seen_s": seen_s,
            "full": change.full,
        }
        for key in change.cleared
    ]
    return rows


def _line(row: dict[str, Any]) -> str:
    tags = " ".join(f"{visible(name)}={value_text(value)}" for name, value in row["tags"].items())
    return f"{row['revision']:<8} {row['change']:<5} {visible(row['key'])}  {tags}".rstrip()
