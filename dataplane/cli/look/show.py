"""`dataplane show`: one key: tags, where its fields lie, its group, and its values if asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.look.preview import Preview, preview_of, tokenizer_of
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
    KeyArgument,
    NameOption,
    PartitionArgument,
    RayOption,
    TimeoutOption,
    reached,
)
from dataplane.cli.shown import age_text, bytes_text, client_text, value_text, visible
from dataplane.cli.since import revision_text
from dataplane.errors import KeyNotFound

if TYPE_CHECKING:
    from dataplane.inspection import KeyReport

WHAT = (
    Column("name", "FIELD"),
    Column("dtype"),
    Column("shape", show=str),
    Column("nbytes", "BYTES", bytes_text, right=True),
)
WHERE = (
    Column("store"),
    Column("block", show=str, right=True),
    Column("segment", show=str, right=True),
    Column("offset", show=str, right=True),
)


def show(
    partition_id: PartitionArgument,
    key: KeyArgument,
    preview: Annotated[
        int, typer.Option(help="Read the values, and show so many of each field.", min=0)
    ] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a tokenizer that says input_ids and labels as text."),
    ] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one key: tags, fields, group, and on demand values.

    Of labels only what is supervised is said as text. As csv: the fields.

    Example: dataplane show train u1_0_0 --preview 8
    """
    speaker = None if tokenizer is None else tokenizer_of(tokenizer)
    with reached(address, name, ray, timeout) as client:
        report = client.inspect([key], partition_id)[0]
        if report is None:
            raise KeyNotFound(
                f"partition {partition_id!r:.80} has no key {key!r:.80}; `dataplane keys "
                "PARTITION` lists what it has",
                partition_id=partition_id,
                keys=[key],
            )
        values = None
        if report.fields and not report.lost and (preview or speaker is not None):
            values = preview_of(client, partition_id, key, preview, speaker)
    told = asdict(report) | ({} if values is None else {"preview": values.told()})
    if output is Output.CSV:
        print_rows(map(asdict, report.fields), (*WHAT, *WHERE), output)
    else:
        print_record(told, output, lambda: _show(report, values))


def _show(report: KeyReport, values: Preview | None) -> None:
    typer.echo(visible(report.key))
    for title, text in _facts(report):
        typer.echo(f"  {title:<9} {text}")
    typer.echo(f"  tags      {bytes_text(report.tag_bytes)}")
    wide = max((len(visible(tag)) for tag in report.tags), default=0)
    for tag, value in sorted(report.tags.items()):
        typer.echo(f"    {visible(tag).ljust(wide)}  {value_text(value)}")
    if report.fields:
        typer.echo("")
        # Where a gateway does not tell where they lie, there is nothing to show of it.
        told = any(field.store for field in report.fields)
        columns = (*WHAT, *WHERE) if told else WHAT
        print_table([asdict(field) for field in report.fields], columns)
    if values is not None:
        typer.echo("")
        _show_values(values)


def _facts(report: KeyReport) -> list[tuple[str, str]]:
    age = "long ago" if report.age_s is None else f"{age_text(report.age_s)} ago"
    producer = report.producer
    who = client_text(producer.label, producer.client_id)
    if producer.label and producer.client_id:
        who += f" ({producer.client_id})"
    facts = [
        ("revision", f"{revision_text(report.revision)}, changed {age}"),
        (
            "producer",
            f"{who}, {'alive' if producer.alive else 'gone'}",
        ),
    ]
    if report.lost:
        facts.append(("lost", "its values died with the store that held them: clear it"))
    if report.group is not None:
        facts.append(("group", _group(report.group)))
    facts += [("task", f"{visible(task)}: {state}") for task, state in sorted(report.tasks.items())]
    return facts


def _group(group: dict[str, Any]) -> str:
    state = "open" if group.get("open") else "closed"
    return (
        f"{visible(str(group.get('uid')))}, attempt {group.get('attempt')}, "
        f"{visible(str(group.get('status')))}, {state}, "
        f"{group.get('sessions')} of {group.get('n')} sessions"
    )


def _show_values(values: Preview) -> None:
    for name, (text, more) in values.lines().items():
        typer.echo(f"{visible(name)}  {more}".rstrip())
        for line in wrap(visible(text), width() - 2):
            typer.echo(f"  {line}")
    for name, text in values.texts.items():
        typer.echo(f"{visible(name)} as text")
        for line in text.split("\n"):
            typer.echo(f"  {visible(line)}")
