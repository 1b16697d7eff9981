"""`dataplane waiters`: every request that waits, for what and since when."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, cast

from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import age_text, client_text, value_text, visible


def who_text(client: dict[str, Any]) -> str:
    """A client as a table names it: where it runs, or else its id."""
    name = client_text(client["label"], client["client_id"])
    return name if client["alive"] else f"{name} (gone)"


COLUMNS = (
    Column("kind"),
    Column("client", "WHO", who_text),
    Column("partition_id", "PARTITION"),
    Column("waited_s", "WAITED", age_text, right=True),
    Column("left_s", "LEFT", age_text, right=True),
    Column("for", "FOR"),
)


def waiters(
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List who waits: for rows, changes, a claim or room.

    The longest first. `dataplane why` with the same --where, --task or --group-by says what is
    missing.

    Example: dataplane waiters
    """
    with reached(address, name, ray, timeout) as client:
        rows = [asdict(each) for each in client.waiters()]
    if output is Output.TABLE:
        rows = [{**row, "for": wanted_text(row)} for row in rows]
    print_rows(rows, COLUMNS if output is Output.TABLE else (), output, empty="nobody waits")


def wanted_text(waiter: dict[str, Any]) -> str:
    """What a request waits for, in a few words."""
    words: list[str] = []
    if waiter["count"] is not None:
        words.append(f"{waiter['count']} {'groups' if waiter['grouped'] else 'rows'}")
    if waiter["task"]:
        words.append(f"for {visible(waiter['task'])}")
    if waiter["fields"]:
        words.append(f"with {visible(', '.join(waiter['fields']))}")
    where = where_text(waiter["where"])
    if where:
        words.append(f"of {where}" if words else where)
    return " ".join(words)


def where_text(where: str) -> str:
    """A predicate as `--where` takes it: terms where there are only such, else JSON."""
    try:
        entries = json.loads(where or "{}")
    except ValueError:
        return visible(where)
    if not isinstance(entries, dict):
        return ""
    terms = cast("dict[str, Any]", entries)
    if all(isinstance(value, (str, int, float)) for value in terms.values()):
        return ", ".join(f"{visible(tag)}={value_text(value)}" for tag, value in terms.items())
    return visible(where)
