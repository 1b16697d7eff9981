"""`dataplane leaks`: what keeps memory, or rows, that nobody will come back for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.check.orphans import orphaned_groups
from dataplane.cli.exits import Code
from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import age_text, bytes_text, client_text, count_text, visible
from dataplane.cli.since import span_s
from dataplane.errors import PartitionNotFound

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.inspection import ClientReport, StoreReport, TaskReport

COLUMNS = (
    Column("kind"),
    Column("where"),
    Column("who"),
    Column("count", show=count_text, right=True),
    Column("bytes", show=bytes_text, right=True),
    Column("age_s", "AGE", age_text, right=True),
)

OF_USE = ("reading", "writing")
"""Kinds that are told for who looks for memory, and are no leak while their client is there."""


def leaks(
    older_than: Annotated[
        str,
        typer.Option(metavar="SPAN", help="Pass over rows, groups and claims that are younger."),
    ] = "1m",
    check: Annotated[bool, typer.Option("--check", help="End with 1 if anything leaks.")] = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show what keeps memory and rows for nobody.

    `orphan blocks`: published, and no row refers to them. `dead blocks`: not freed, for readers
    hold them. `group`: open, its producer gone. `claim`: its consumers gone. `committed`: by every
    task, and not cleared (at least so many). `unreachable`: a store that does not answer. Also who
    is `reading` and `writing` now, which is no leak.

    Example: dataplane leaks --older-than 10m --check
    """
    age_s = span_s(older_than)
    with reached(address, name, ray, timeout) as client:
        found = [*_of_stores(client.holdings()), *_of_rows(client, age_s)]
    print_rows(found, COLUMNS, output, empty="nothing leaks")
    wrong = [row for row in found if row["kind"] not in OF_USE]
    if output is Output.TABLE:
        for advice in dict.fromkeys(row["advice"] for row in wrong):
            typer.echo(advice)
    if check and wrong:
        raise typer.Exit(Code.BAD)


def _leak(
    kind: str,
    where: str,
    who: str,
    count: int,
    size: int | None,
    age_s: float | None,
    advice: str,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "where": where,
        "who": who,
        "count": count,
        "bytes": size,
        "age_s": age_s,
        "advice": advice,
    }


def _of_stores(stores: list[StoreReport]) -> Iterator[dict[str, Any]]:
    for store in stores:
        if not store.reachable:
            advice = f"{store.store_id} does not answer: {visible(store.error)}"
            yield _leak("unreachable", store.store_id, "", 0, None, None, advice)
            continue
        if store.orphans:
            advice = (
                f"{store.store_id}: orphan blocks go when its process is started again; please "
                "report them"
            )
            sizes = [orphan["bytes"] for orphan in store.orphans if "bytes" in orphan]
            size = sum(sizes) if sizes else None
            yield _leak("orphan blocks", store.store_id, "", len(store.orphans), size, None, advice)
        readers = [pin for pin in store.pins if pin["dead_bytes"]]
        if store.dead_blocks or readers:
            who = ", ".join(_who(pin["client"]) for pin in readers)
            size = sum(pin["dead_bytes"] for pin in readers)
            advice = (
                f"{store.store_id}: dead blocks are freed when who reads them lets go: "
                f"{visible(who) or 'nobody does, so the next free takes them'}"
            )
            yield _leak("dead blocks", store.store_id, who, store.dead_blocks, size, None, advice)
        for kind, held in zip(OF_USE, (store.pins, store.reservations), strict=True):
            for each in held:
                who, age_s = _who(each["client"]), each.get("age_s")
                yield _leak(kind, store.store_id, who, each["blocks"], each["bytes"], age_s, "")


def _of_rows(client: Client, age_s: float) -> Iterator[dict[str, Any]]:
    tasks = client.tasks()
    claims = client.claims()
    for partition in sorted(client.kv_list_partitions()):
        try:
            yield from _groups(client, partition, age_s)
            yield from _committed(client, partition, age_s, tasks)
        except PartitionNotFound:
            continue  # it was dropped meanwhile
    for claim in claims:
        if claim.age_s < age_s or any(holder.alive for holder in claim.holders):
            continue
        who = ", ".join(map(_who, claim.holders))
        where = f"{claim.partition_id}, task {claim.task}"
        advice = (
            f"claims of consumers that are gone end with their terms; at once with `dataplane "
            f"release {visible(claim.partition_id)} --dead`"
        )
        yield _leak("claim", where, who, len(claim.keys), None, claim.age_s, advice)


def _groups(client: Client, partition: str, age_s: float) -> Iterator[dict[str, Any]]:
    for orphan in orphaned_groups(client, partition):
        if orphan.age_s is not None and orphan.age_s < age_s:
            continue
        where = f"{partition}, group {orphan.uid}"
        advice = (
            "groups whose producer is gone are cleared with `dataplane clear "
            f"{visible(partition)} --orphans`"
        )
        size = client.tally(partition, where={"uid": orphan.uid}).payload_bytes
        yield _leak(
            "group", where, _who(orphan.producer), orphan.sessions, size, orphan.age_s, advice
        )


def _committed(
    client: Client, partition: str, age_s: float, tasks: list[TaskReport]
) -> Iterator[dict[str, Any]]:
    """Rows that every task of the partition has committed, of those that are old enough."""
    of = [task for task in tasks if task.partition_id == partition]
    until = client.revision_before(age_s) if of else None
    if until is None:
        return
    old = client.tally(partition, until=until)
    left = sum(task.lag for task in of)
    if old.rows > left:
        advice = (
            "rows that are committed by all tasks are the trainer's to clear; by hand with "
            f"`dataplane clear {visible(partition)} --older-than …`"
        )
        who = ", ".join(task.task for task in of)
        size = old.payload_bytes if not left else None
        yield _leak("committed", partition, who, old.rows - left, size, age_s, advice)


def _who(client: ClientReport) -> str:
    return client_text(client.label, client.client_id)
