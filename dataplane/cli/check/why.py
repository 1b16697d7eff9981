"""`dataplane why`: why something waits, and on whom."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.names import names_of
from dataplane.cli.output import Column, Output, OutputOption, print_record, print_table
from dataplane.cli.reach import (
    AddressOption,
    NameOption,
    RayOption,
    TimeoutOption,
    complete_partition,
    reached,
)
from dataplane.cli.shown import ABSENT, age_text, visible_lines
from dataplane.cli.where import WhereOption, parse_where

if TYPE_CHECKING:
    from dataplane.types import Explanation

STUCK = (
    Column("key"),
    Column("status"),
    Column("age_s", "AGE", age_text, right=True),
    Column("sessions_text", "SESSIONS", right=True),
    Column("producer"),
    Column("alive", "ALIVE"),
)


def why(
    partition_id: Annotated[
        str | None,
        typer.Argument(
            help="The partition; who holds the memory of the whole plane, without one.",
            metavar="[PARTITION]",
            autocompletion=complete_partition,
            show_default=False,
        ),
    ] = None,
    where: WhereOption = None,
    task: Annotated[
        str | None, typer.Option(help="The rows that this consumer's claims would get.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(help="Fields that the rows have to have: a,b.", metavar="NAMES"),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(help="Whole groups by this tag, which is uid.", metavar="TAG")
    ] = None,
    count: Annotated[int | None, typer.Option(help="How many are wanted.", min=1)] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain why a consumer waits: what is missing, who is late.

    Say what the consumer waits for as it says it: which rows, or whole groups, and how many.

    Example: dataplane why train --where status=completed --group-by uid --count 2
    """
    with reached(address, name, ray, timeout) as client:
        found = client.explain(
            partition_id,
            parse_where(where),
            task=task,
            fields=names_of(fields, "--fields") or (),
            group_by=group_by,
            count=count,
        )
    print_record(asdict(found), output, lambda: _show(found))


def _show(found: Explanation) -> None:
    typer.echo(visible_lines(found.text))
    if found.stuck:
        typer.echo("")
        print_table(
            [{**each, "sessions_text": _sessions(each.get("sessions"), each.get("n"))}
             for each in found.stuck],
            STUCK,
        )  # fmt: skip


def _sessions(here: object, wanted: object) -> str:
    return ABSENT if wanted is None else f"{here} of {wanted}"
