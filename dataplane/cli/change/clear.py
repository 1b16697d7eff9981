"""`dataplane clear`: rows are removed, after they were counted and somebody agreed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.asking import DryRunOption, YesOption, agreed
from dataplane.cli.check.orphans import orphaned_groups
from dataplane.cli.names import listed
from dataplane.cli.output import Output, OutputOption, print_record
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import bytes_text, client_text, count_text, visible
from dataplane.cli.since import span_s
from dataplane.cli.where import WhereOption, parse_where
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.types import Revision

YOUNG_S = 30.0
"""A tag store that came up so recently may not have all of its clients back."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which rows of a partition are meant: these keys, or those that match."""

    partition_id: str
    keys: list[str] | None
    where: dict[str, Any] | None
    until: Revision
    """Rows that changed after it stay: what was shown is what is cleared."""
    rows: int
    payload_bytes: int
    tag_bytes: int
    statuses: dict[str, list[int]]
    groups_open: int
    sample: list[str]


def clear(
    partition: PartitionArgument,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEYS", help="The keys; or say which rows.")
    ] = None,
    where: WhereOption = None,
    status: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Rows in this status; may be repeated.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Rows that have not changed for 90s, 10m, 2h, 1d."),
    ] = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Open groups whose producer is gone.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every row.")] = False,
    retire: Annotated[
        bool, typer.Option("--retire", help="Close the open groups of the rows as well.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Remove rows with their tags and values.

    Says first how many there are, how large, in which status, and asks. Only these are removed:
    a row that is written meanwhile stays. --orphans takes the prompts and rows (by the tag `uid`)
    of groups that are open and whose producer has no connection any more, and closes the groups.

    Example: dataplane clear train --status failed --older-than 1h --dry-run
    """
    by_rows = where is not None or status or older_than is not None or everything
    if sum(map(bool, (keys, by_rows, orphans))) != 1:
        raise InvalidRequest(
            "say which rows, in one way: KEYS; or --where, --status, --older-than (all that are "
            "given hold) or --all; or --orphans"
        )
    with reached(address, name, ray, timeout) as client:
        notes: list[str] = []
        if keys:
            chosen = _by_key(client, partition, list(dict.fromkeys(keys)))
        elif orphans:
            chosen, notes = _orphans(client, partition)
            retire = True
        else:
            chosen = _matching(client, partition, predicate(where, status), older_than)
        lines = [*_lines(chosen, retire=retire), *notes]
        record: dict[str, Any] = {
            "partition_id": partition,
            "revision": chosen.until,
            "rows": chosen.rows,
            "payload_bytes": chosen.payload_bytes,
            "tag_bytes": chosen.tag_bytes,
            "statuses": {
                each: {"rows": rows, "bytes": size}
                for each, (rows, size) in chosen.statuses.items()
            },
            "groups_open": chosen.groups_open,
            "sample": chosen.sample,
            "dry_run": dry_run,
            "cleared": 0,
        }
        if dry_run:
            print_record(record, output, lambda: _say([*lines, "nothing was cleared (--dry-run)"]))
            return
        question = f"Clear {_rows(chosen.rows)} of {visible(partition)}?"
        if chosen.rows and agreed(lines, question, yes=yes):
            record["cleared"] = client.kv_clear(
                chosen.keys, partition, where=chosen.where, retire=retire, until=chosen.until
            )
    print_record(record, output, lambda: _say(_outcome(chosen, record["cleared"])))


def predicate(where: list[str] | None, status: list[str] | None) -> dict[str, Any]:
    """What `--where` and `--status` say together."""
    parts: list[dict[str, Any]] = []
    asked = parse_where(where)
    if asked is not None:
        parts.append(asked)
    if status:
        parts.append({"status": {"in": status}})
    if not parts:
        return {}
    return parts[0] if len(parts) == 1 else {"and": parts}


def _matching(
    client: Client, partition: str, where: dict[str, Any], older_than: str | None
) -> Chosen:
    until = None
    if older_than is not None:
        until = client.revision_before(span_s(older_than))
        if until is None:
            now = client.kv_list(partition, limit=1).revision
            return Chosen(partition, None, where, now, 0, 0, 0, {}, 0, [])
    tally = client.tally(partition, where=where, until=until)
    return Chosen(
        partition, None, where, tally.revision, tally.rows, tally.payload_bytes, tally.tag_bytes,
        tally.statuses, tally.groups_open, tally.sample,
    )  # fmt: skip


def _by_key(client: Client, partition: str, keys: list[str]) -> Chosen:
    # From before they are looked at: what changes from here on was not shown.
    until = client.kv_list(partition, limit=1).revision
    found = [report for report in client.inspect(keys, partition) if report is not None]
    statuses: dict[str, list[int]] = {}
    for report in found:
        status = report.tags.get("status")
        of = statuses.setdefault(status if isinstance(status, str) else "", [0, 0])
        of[0] += 1
        of[1] += report.tag_bytes + sum(field.nbytes for field in report.fields)
    tag_bytes = sum(report.tag_bytes for report in found)
    return Chosen(
        partition, keys, None, until, len(found),
        sum(size for _, size in statuses.values()) - tag_bytes, tag_bytes, statuses,
        len({g["attempt"] for r in found if (g := r.group) is not None and g["open"]}),
        [report.key for report in found],
    )  # fmt: skip


def _orphans(client: Client, partition: str) -> tuple[Chosen, list[str]]:
    groups = orphaned_groups(client, partition)
    chosen = _matching(client, partition, {"uid": {"in": [g.uid for g in groups]}}, None)
    notes: list[str] = []
    if groups:
        makers = {client_text(g.producer.label, g.producer.client_id) for g in groups}
        notes.append(f"their producers have no connection: {listed(sorted(makers))}")
    up_s = client.status().get("uptime_s")
    if groups and up_s is not None and up_s < YOUNG_S:
        notes.append(
            f"careful: the tag store came up {up_s:.0f} s ago, and producers that live may not be "
            "back yet"
        )
    return chosen, notes


def _rows(count: int) -> str:
    return f"{count_text(count)} row{'' if count == 1 else 's'}"


def _lines(chosen: Chosen, *, retire: bool) -> list[str]:
    """What would be cleared, for people."""
    n = f"{chosen.until.epoch}:{chosen.until.n}"
    size = bytes_text(chosen.payload_bytes + chosen.tag_bytes)
    lines = [
        f"{visible(chosen.partition_id)}: {_rows(chosen.rows)}, {size} with tags, as of "
        f"revision {n}"
    ]
    for status, (rows, nbytes) in chosen.statuses.items():
        lines.append(
            f"  {visible(status) or '(no status)':<12} {_rows(rows):>14}  {bytes_text(nbytes)}"
        )
    if chosen.sample:
        lines.append(f"  keys: {listed(chosen.sample)}")
    if chosen.groups_open:
        open_ = f"{count_text(chosen.groups_open)} of their groups are open"
        lines.append(
            f"  {open_}, and will be closed"
            if retire
            else f"  {open_}: producers may go on putting rows, unless --retire closes them"
        )
    return lines


def _outcome(chosen: Chosen, cleared: int) -> list[str]:
    lines = [f"cleared {_rows(cleared)} of {visible(chosen.partition_id)}"]
    if not chosen.rows:
        lines = [f"{visible(chosen.partition_id)}: no such row"]
    elif 0 < cleared < chosen.rows:
        lines.append(f"{_rows(chosen.rows - cleared)} changed or went meanwhile")
    return lines


def _say(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
