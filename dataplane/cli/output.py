"""What commands print: rows, one record, or a line each time something happens.

Owns the four forms. `json` and `yaml` carry values as they are, in a fixed order, one document on
standard output (streams: one JSON object a line, one YAML document each); `csv` has a header and
one line a row, lists and maps as JSON in a cell; `table` is for people: sizes and spans are
rounded, and nothing in it can play with the terminal. csv is escaped as a table is.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import select
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

import typer

from dataplane.cli.shown import value_text, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CHOSEN: Final = "dataplane.output"
"""Where the context of a command keeps the chosen form, for whoever tells its error."""


class Output(StrEnum):
    """The forms in which a command can print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def _note(ctx: typer.Context, chosen: Output) -> Output:
    ctx.meta[CHOSEN] = chosen
    return chosen


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="How to print it.", callback=_note, case_sensitive=False),
]
"""The option of every command that prints something: `output: OutputOption = Output.TABLE`."""


class Column(NamedTuple):
    """A column of a table: the entry of a row that it shows, and how."""

    name: str
    """The row's key, which is also the column of the csv."""
    title: str = ""
    """The heading; the name in capitals if empty."""
    show: Callable[[Any], str] = value_text
    """The value as a person reads it."""
    right: bool = False
    """Whether it is set to the right, as numbers are."""


def print_rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: Output,
    *,
    empty: str = "none",
) -> None:
    """Print rows. Machine forms carry every entry of a row, those of `columns` first; a table
    shows the columns, and `empty` where there is no row."""
    listed = [_ordered(row, columns) for row in rows]
    if output is Output.JSON:
        _out(json_text(listed))
    elif output is Output.YAML:
        _out(_yaml(listed))
    elif output is Output.CSV:
        names = [column.name for column in columns]
        more = {name: None for row in listed for name in row if name not in names}
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*map(visible, names), *map(visible, more)])
        writer.writerows([_cell(row.get(name)) for name in (*names, *more)] for row in listed)
    elif not listed:
        _out(empty)
    else:
        print_table(listed, columns)


def print_record(
    record: Mapping[str, Any],
    output: Output,
    show: Callable[[], None] | None = None,
) -> None:
    """Print one thing. As a table: what `show` prints, or each entry on a line."""
    plain = plain_of(record)
    if output is Output.JSON:
        _out(json_text(plain))
    elif output is Output.YAML:
        _out(_yaml(plain))
    elif output is Output.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([visible(str(name)) for name in plain])
        writer.writerow([_cell(value) for value in plain.values()])
    elif show is not None:
        show()
    else:
        width = max((len(str(name)) for name in plain), default=0)
        for name, value in plain.items():
            _out(f"{visible(str(name)).ljust(width)}  {value_text(value)}")


def print_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    """Print a table for people, as wide as the terminal and no wider."""
    table = new_table(columns)
    for row in rows:
        add_row(table, [column.show(row.get(column.name)) for column in columns])
    print_rich(table)


def new_table(columns: Sequence[Column], **settings: Any) -> Table:
    """An empty table in the style of all tables here."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **settings)
    for column in columns:
        table.add_column(
            _text(column.title or column.name.upper().replace("_", " ")),
            justify="right" if column.right else "left",
            overflow="fold",
        )
    return table


def add_row(table: Table, cells: Sequence[str], style: str | None = None) -> None:
    """Add a row of texts, which are shown as they are: no markup in them means anything."""
    table.add_row(*(_text(visible(cell)) for cell in cells), style=style)


def print_rich(*shown: Any) -> None:
    """Print what rich knows to draw, at the terminal's width: 80 where there is no terminal."""
    console = console_of(sys.stdout)
    with console.capture() as captured:
        for each in shown:
            console.print(each)
    for line in captured.get().splitlines():
        _out(line.rstrip())


def console_of(file: IO[str], **settings: Any) -> Console:
    """A console on which nothing that is shown is taken for markup."""
    from rich.console import Console

    return Console(file=file, width=width(), markup=False, emoji=False, highlight=False, **settings)


def width() -> int:
    """How many letters a line has."""
    return max(shutil.get_terminal_size((80, 24)).columns, 20)


class Stream:
    """Rows that are printed one by one, as they come: each is out before the next is waited for."""

    def __init__(self, columns: Sequence[Column], output: Output) -> None:
        self._columns = columns
        self._output = output
        self._begun = False

    def print(self, row: Mapping[str, Any], line: str | None = None) -> None:
        """Print a row; for people `line`, or its columns side by side."""
        ordered = _ordered(row, self._columns)
        if self._output is Output.JSON:
            _out(json_line(ordered))
        elif self._output is Output.YAML:
            _out("---\n" + _yaml(ordered))
        elif self._output is Output.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            if not self._begun:
                writer.writerow([column.name for column in self._columns])
            writer.writerow([_cell(ordered.get(column.name)) for column in self._columns])
        elif line is not None:
            _out(visible(line))
        else:
            _out("  ".join(column.show(ordered.get(column.name)) for column in self._columns))
        self._begun = True
        sys.stdout.flush()


def reader_left() -> bool:
    """Whether standard output is a pipe whose other end is closed: nobody reads on."""
    try:
        ready = select.poll()
        ready.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in ready.poll(0))
    except (OSError, ValueError):  # it is no file
        return False


def json_text(value: Any) -> str:
    """A JSON document for programs and people: indented, ASCII, no NaN."""
    return json.dumps(plain_of(value), indent=2, allow_nan=False)


def json_line(value: Any) -> str:
    """The same on one line."""
    return json.dumps(plain_of(value), allow_nan=False)


def plain_of(value: Any) -> Any:
    """The value as JSON has them: dataclasses as maps, arrays' numbers as numbers, null for the
    numbers that JSON lacks."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {str(name): plain_of(each) for name, each in entries.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = cast("Iterable[Any]", value)
        return [plain_of(each) for each in items]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: plain_of(getattr(value, name)) for name in names}
    listed = getattr(cast("Any", value), "tolist", None)
    if callable(listed):  # a number or an array of numpy's or torch's
        return plain_of(listed())
    return str(value)


def _ordered(row: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """The row's entries, those of the columns first."""
    plain = plain_of(row)
    first = {column.name: plain[column.name] for column in columns if column.name in plain}
    return first | plain


def _cell(value: Any) -> Any:
    """A value as a cell of csv."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return visible(value) if isinstance(value, str) else value


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=False).rstrip("\n")


def _text(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
