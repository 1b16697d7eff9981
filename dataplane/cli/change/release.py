"""`dataplane release`: claims are given back for consumers that will not do it themselves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dataplane.cli.asking import DryRunOption, YesOption, agreed
from dataplane.cli.names import listed
from dataplane.cli.output import Column, Output, OutputOption, print_rows
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import age_text, client_text, count_text, visible
from dataplane.errors import ClaimLost
from dataplane.inspection import ClaimReport, ClientReport


def _holder(holder: dict[str, Any]) -> str:
    """A holder on one line."""
    who = client_text(holder["label"], holder["client_id"])
    return who if holder["alive"] else f"{who} (no connection)"


def _holders(holders: list[dict[str, Any]]) -> str:
    return ", ".join(map(_holder, holders)) or "nobody"


COLUMNS = (
    Column("task"),
    Column("claim_id", "CLAIM", str, right=True),
    Column("rows", show=count_text, right=True),
    Column("age_s", "AGE", age_text, right=True),
    Column("left_s", "TERM", age_text, right=True),
    Column("holders", show=_holders),
    Column("outcome"),
)


def release(
    partition: PartitionArgument,
    task: Annotated[str | None, typer.Option(help="Claims of this task.")] = None,
    claim: Annotated[int | None, typer.Option(help="The claim of this number.")] = None,
    client: Annotated[
        str | None,
        typer.Option(help="Claims of this client: its id, or a part of its label."),
    ] = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Claims none of whose holders has a connection.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Give claimed rows back, to be offered to their task again.

    Shows the claims that are meant and asks. A consumer that is alive after all finds its claim
    lost when it commits, and nothing is done twice. A claim of a dead consumer goes back by itself
    when its term (TERM) is over.

    Example: dataplane release train --task actor --dead --dry-run
    """
    with reached(address, name, ray, timeout) as plane:
        found = [
            each
            for each in plane.claims(partition)
            if (task is None or each.task == task)
            and (claim is None or each.claim_id == claim)
            and (client is None or any(_is(holder, client) for holder in each.holders))
            and not (dead and any(holder.alive for holder in each.holders))
        ]
        rows = [_row(each) for each in found]
        count = sum(len(each.keys) for each in found)
        many = f"{count_text(len(found))} claim{'' if len(found) == 1 else 's'}"
        question = f"Release {many} with {count_text(count)} rows of {visible(partition)}?"
        if found and not dry_run and agreed([_line(each) for each in found], question, yes=yes):
            for each, row in zip(found, rows, strict=True):
                row["outcome"] = _release(plane, each)
    print_rows(rows, COLUMNS, output, empty="no such claim")


def _release(plane: Any, claim: ClaimReport) -> str:
    from dataplane.types import Claim, KVBatchMeta

    tags: list[Any] = [{} for _ in claim.keys]
    meta = KVBatchMeta(claim.partition_id, claim.keys, tags)
    try:
        plane.kv_release(Claim(claim.task, claim.claim_id, meta, [1] * len(claim.keys)))
    except ClaimLost:
        return "ended meanwhile"
    return "released"


def _is(holder: ClientReport, client: str) -> bool:
    return client == holder.client_id or client in holder.label


def _row(claim: ClaimReport) -> dict[str, Any]:
    return {
        "partition_id": claim.partition_id,
        "task": claim.task,
        "claim_id": claim.claim_id,
        "rows": len(claim.keys),
        "age_s": claim.age_s,
        "left_s": claim.left_s,
        "holders": [
            {"client_id": h.client_id, "label": h.label, "alive": h.alive} for h in claim.holders
        ],
        "keys": claim.keys,
        "outcome": "held",
    }


def _line(claim: ClaimReport) -> str:
    who = _holders(_row(claim)["holders"])
    rows = "1 row" if len(claim.keys) == 1 else f"{count_text(len(claim.keys))} rows"
    return (
        f"claim {claim.claim_id} of task {visible(claim.task)}, {age_text(claim.age_s)} old, held "
        f"by {who}: {rows}: {listed(claim.keys)}"
    )
