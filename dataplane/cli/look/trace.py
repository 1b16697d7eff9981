"""`dataplane trace`: the life of a group or a key, what happens now, exports and comparisons.

`dataplane trace UID` is `dataplane trace group UID`: what is no command is taken for a uid.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dataplane.cli.commands import Group
from dataplane.cli.exits import Code
from dataplane.cli.look.trace_table import By, moment, print_trace
from dataplane.cli.output import (
    Column,
    Output,
    OutputOption,
    Stream,
    print_record,
    print_rows,
    reader_left,
)
from dataplane.cli.reach import AddressOption, NameOption, RayOption, TimeoutOption, reached
from dataplane.cli.shown import value_text, visible
from dataplane.errors import InvalidRequest, KeyNotFound

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.lineage.rows import Trace, TraceRow

LOOK_S: Final = 1.0
"""How long nothing happens until it is looked again."""

ROWS: Final = (
    "number", "n", "ts", "stage", "op", "status", "uid", "session_id", "index", "key", "partition",
    "field", "producer", "consumer", "shape", "layout", "dtype", "device", "len", "valid_len",
    "mask_sum", "global_steps", "min_global_steps", "max_global_steps", "is_padding", "gen",
    "bytes", "ms", "hash", "preview", "client", "tags", "detail",
)  # fmt: skip
"""Columns of a csv, of which rows have no others."""
DIFFERENCES: Final = tuple(
    Column(name)
    for name in ("session_id", "index", "stage", "op", "field", "column", "left", "right")
)


class WithDefault(Group):
    """A group of commands whose first, `group`, is meant where no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The rest of the line, with the command that it leaves out."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["group", *args]
        return super().parse_args(ctx, args)


class Format(StrEnum):
    """What an export is for."""

    JSONL = "jsonl"
    CHROME = "chrome"


trace = typer.Typer(
    name="trace",
    cls=WithDefault,
    help="Follow the life of a group: who wrote, read and cleared what. `trace UID` does.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PartitionOption = Annotated[
    str | None, typer.Option("--partition", help="Only there; everywhere if not given.")
]
FieldsOption = Annotated[
    str | None, typer.Option("--fields", help="Only these fields, with commas between.")
]
ByOption = Annotated[By, typer.Option("--by", help="What the table is ordered by first.")]
PreviewOption = Annotated[
    bool, typer.Option("--preview", help="Show hashes and first elements, where they are kept.")
]
UidArgument = Annotated[str, typer.Argument(help="The group's uid, which is its prompt's key.")]


@trace.command()
def group(
    uid: UidArgument,
    partition: PartitionOption = None,
    fields: FieldsOption = None,
    by: ByOption = By.KEY,
    check: Annotated[
        bool, typer.Option("--check", help="End with 1 if a rule fails; say what is not judged.")
    ] = False,
    preview: PreviewOption = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show every request about a prompt and its trajectories, and judge them.

    Padding rows that went with them are shown too. What failed a rule names the two requests
    that disagree, by the numbers in the column #. docs/trace.md has the rules.

    Example: dataplane trace group u1 --check
    """
    with reached(address, name, ray, timeout) as client:
        found = client.trace(partition, uid=uid)
    _known(found, f"uid {uid!r}")
    _print(found, fields, by, output, check=check, preview=preview)
    if check and found.failed:
        raise typer.Exit(Code.BAD)


@trace.command()
def key(
    key: Annotated[str, typer.Argument(help="The key.")],
    partition: PartitionOption = None,
    fields: FieldsOption = None,
    preview: PreviewOption = False,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show every request about one key.

    Example: dataplane trace key u1_0_0 --output json
    """
    with reached(address, name, ray, timeout) as client:
        found = client.trace(partition, key=key)
    _known(found, f"key {key!r}")
    _print(found, fields, By.KEY, output, check=False, preview=preview)


@trace.command()
def tail(
    partition: PartitionOption = None,
    stage: Annotated[str | None, typer.Option(help="Only requests of this stage.")] = None,
    since: Annotated[
        int | None, typer.Option(help="From this request on, by its number; now if not given.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after so many lines.", min=1)] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="End after so many seconds without a line.", metavar="SECONDS"),
    ] = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Follow all requests: a line for each key and field, as they happen.

    Until Ctrl-C, --count or --timeout.

    Example: dataplane trace tail --partition train --since 0 --count 5
    """
    lines = Stream(tuple(Column(column) for column in ROWS), output)
    left = count
    try:
        with reached(address, name, ray) as client:
            at = _present(client) if since is None else since
            quiet_since = time.monotonic()
            while not reader_left():
                found = client.trace(partition, since=at)
                at = found.next
                for row in found.rows:
                    if stage is not None and row.stage != stage:
                        continue
                    quiet_since = time.monotonic()
                    lines.print(asdict(row), _line(row))
                    left = None if left is None else left - 1
                    if left == 0:
                        return
                if timeout is not None and time.monotonic() - quiet_since >= timeout:
                    return
                if not found.rows:
                    time.sleep(LOOK_S if timeout is None else min(LOOK_S, timeout))
    except KeyboardInterrupt:
        return


@trace.command()
def export(
    uid: UidArgument,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    form: Annotated[
        Format,
        typer.Option("--format", help="jsonl: one row a line; chrome: for about:tracing."),
    ] = Format.JSONL,
    partition: PartitionOption = None,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write the trace of a group to a file.

    Example: dataplane trace export u1 --out u1.jsonl
    """
    from dataplane.lineage.export import chrome, rows_as_data

    with reached(address, name, ray, timeout) as client:
        found = client.trace(partition, uid=uid)
    _known(found, f"uid {uid!r}")
    if form is Format.CHROME:
        text = json.dumps(chrome(found)) + "\n"
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows_as_data(found.rows))
    try:
        out.write_text(text)
    except OSError as error:
        raise InvalidRequest(f"--out {str(out)!r} cannot be written: {error}") from None
    typer.echo(f"{visible(str(out))}: {len(found.rows)} rows of uid {visible(uid)}")


@trace.command()
def diff(
    left: Annotated[str, typer.Argument(help="A uid, or a file that `trace export` wrote.")],
    right: Annotated[str, typer.Argument(help="Another one.")],
    partition: PartitionOption = None,
    output: OutputOption = Output.TABLE,
    address: AddressOption = None,
    name: NameOption = None,
    ray: RayOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Compare two groups, or one in two runs: lengths, dtypes, counts, hashes.

    Ends with 1 if they differ. A file needs a plane no more.

    Example: dataplane trace diff u1 u1
    """
    from dataplane.lineage.diff import differences

    sides = [_read(Path(each)) if Path(each).is_file() else None for each in (left, right)]
    if None in sides:
        with reached(address, name, ray, timeout) as client:
            for i, uid in enumerate((left, right)):
                if sides[i] is None:
                    found = client.trace(partition, uid=uid)
                    _known(found, f"uid {uid!r}")
                    sides[i] = [row for row in found.rows if row.uid == uid or row.key == uid]
    one, other = sides
    assert one is not None
    assert other is not None
    different = differences(one, other)
    print_rows([asdict(each) for each in different], DIFFERENCES, output, empty="no difference")
    if different:
        raise typer.Exit(Code.BAD)


# -- inside ----------------------------------------------------------------------------------


def _known(found: Trace, what: str) -> None:
    """KeyNotFound if nothing is known of it."""
    if not found.rows and not found.present:
        older = f"; {found.gone} older requests are not remembered any more" if found.gone else ""
        raise KeyNotFound(
            f"nothing is known of {what}: no request named it{older}. Is it spelled as in the "
            "tag `uid`, and is this the plane?",
            partition_id=found.partition_id or "",
            keys=[],
        )


def _print(
    found: Trace, fields: str | None, by: By, output: Output, *, check: bool, preview: bool
) -> None:
    names = None if fields is None else {each.strip() for each in fields.split(",")}
    rows = [
        row
        for row in found.rows
        if names is None or row.field in names or row.field.startswith("*")
    ]
    if output is Output.CSV:
        print_rows([asdict(row) for row in rows], [Column(column) for column in ROWS], output)
        return
    record = asdict(found) | {"rows": [asdict(row) for row in rows]}
    print_record(
        record,
        output,
        lambda: print_trace(found, rows, by, whole=names is not None, check=check, preview=preview),
    )


def _present(client: Client) -> int:
    """The number that the next request will have."""
    at = 0
    while True:
        following = client.trace(since=at, limit=1).next
        if following == at:
            return at
        at = client.trace(since=following, limit=100_000).next


def _line(row: TraceRow) -> str:
    said = [row.partition, visible(row.key), row.field]
    if row.producer or row.consumer:
        said.append(f"{visible(row.producer) or '-'} > {visible(row.consumer) or '-'}")
    if row.shape is not None:
        said.append(f"{row.dtype}{tuple(row.shape)}")
    if row.status != "ok":
        said.append(row.status)
    if row.tags:
        said.append(" ".join(f"{n}={value_text(v)}" for n, v in sorted(row.tags.items())))
    elif row.detail:
        said.append(row.detail)
    head = f"#{row.number:<6} {moment(row.ts)} {row.stage or '-':<13} {row.op:<7}"
    return f"{head} {'  '.join(map(visible, said))}".rstrip()


def _read(path: Path) -> list[TraceRow]:
    """Rows that an export wrote. InvalidRequest if they are none."""
    from dataplane.lineage.export import row_from_data

    rows: list[TraceRow] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                row = row_from_data(json.loads(line), number)
                if not row.is_padding:
                    rows.append(row)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{str(path)!r} is no export of a trace: {error}") from None
    return rows
