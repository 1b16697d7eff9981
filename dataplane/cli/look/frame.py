"""A frame of `dataplane top` as rich draws it: made for 80 columns, clear without colour.

Red is for what somebody should look at: a store that is full or does not answer, an open group
whose producer is gone; yellow for what is about to be: little room is left, or somebody waits for
some. What does not fit on the terminal is counted rather than cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dataplane.cli.check.waiters import wanted_text, who_text
from dataplane.cli.look.sample import HISTORY, Sample
from dataplane.cli.output import Column, add_row, new_table
from dataplane.cli.shown import (
    ABSENT,
    age_text,
    bar,
    bytes_text,
    count_text,
    rate_text,
    share_text,
    short,
    sparkline,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

BAR: Final = 24
ROWS: Final = 6
"""Rows of a section at most; what is left out is counted."""
LONG: Final = 30
"""Letters of what is said in words."""
NAME: Final = 20
"""Letters of a name."""
FULL, NEARLY = 0.95, 0.8
RATES: Final = (
    ("rows_put", "put"),
    ("rows_got", "read"),
    ("rows_claimed", "claimed"),
    ("rows_cleared", "cleared"),
)
"""Counters of rows that have a place in a frame, and what it calls them."""


def _name(name: str) -> str:
    return short(visible(name), NAME)


def _partition(name: str) -> str:
    return short(visible(name), 12)


def _who(client: dict[str, Any]) -> str:
    return short(who_text(client), NAME)


def _long(text: str) -> str:
    text = visible(text)
    return text if len(text) <= LONG else f"{text[: LONG - 1]}…"


def _signed(rate: float | None) -> str:
    if rate is None:
        return ABSENT
    return "0" if abs(rate) < 0.05 else f"{rate:+,.1f}"


PARTITIONS: Final = (
    Column("partition_id", "PARTITION", _name),
    Column("keys", "KEYS", count_text, right=True),
    Column("keys_per_s", "KEYS/S", _signed, right=True),
    Column("payload_bytes", "VALUES", bytes_text, right=True),
    Column("used_bytes", "IN USE", bytes_text, right=True),
    Column("quota_bytes", "QUOTA", bytes_text, right=True),
    Column("groups", "GROUPS", count_text, right=True),
    Column("waiting", "WAIT", count_text, right=True),
)
TASKS: Final = (
    Column("task", "TASK", _name),
    Column("partition_id", "PARTITION", _name),
    Column("lag", "LAG", count_text, right=True),
    Column("held", "HELD", count_text, right=True),
    Column("committed", "DONE", count_text, right=True),
    Column("waiting", "WAITING", count_text, right=True),
)
WAITERS: Final = (
    Column("kind", "WAITS FOR"),
    Column("partition_id", "PARTITION", _partition),
    Column("waited_s", "SINCE", age_text, right=True),
    Column("client", "WHO", _who),
    Column("for", "WHAT", _long),
)
GROUPS: Final = (
    Column("key", "GROUP", _name),
    Column("partition_id", "PARTITION", _partition),
    Column("age_s", "AGE", age_text, right=True),
    Column("sessions", "SESSIONS", right=True),
    Column("producer", "PRODUCER", _long),
)


Section: TypeAlias = tuple[str, list[dict[str, Any]], tuple[Column, ...]]
"""What it is of, its rows, the most urgent first, and their columns."""


def frame(sample: Sample, interval_s: float | None = None, height: int | None = None) -> Group:
    """Everything that one look found, on so many lines if that can be."""
    from rich.console import Group

    head = [
        _head(sample, interval_s), _line(), *_stores(sample), _line(), *_rates(sample),
    ]  # fmt: skip
    sections = _sections(sample)
    limit = ROWS
    while height is not None and limit > 1 and len(head) + _lines(sections, limit) > height:
        limit -= 1
    return Group(*head, *(part for section in sections for part in _section(section, limit)))


def _sections(sample: Sample) -> list[Section]:
    partitions = sorted(sample.partitions, key=lambda each: (-each["waiting"], -each["used_bytes"]))
    tasks = sorted(sample.tasks, key=lambda each: -each["lag"])
    waiters = [{**each, "for": wanted_text(each)} for each in sample.waiters]
    return [
        ("partitions", partitions, PARTITIONS),
        ("tasks", tasks, TASKS),
        ("waiters", waiters, WAITERS),
        ("open groups", [_group(each) for each in sample.groups], GROUPS),
    ]


def _lines(sections: Sequence[Section], limit: int) -> int:
    """How many lines the sections take with so many rows each."""
    return sum(2 + min(len(rows), limit) + (len(rows) > limit) for _, rows, _ in sections)


def _head(sample: Sample, interval_s: float | None) -> Text:
    text = _line()
    text.append(short(visible(sample.name), NAME), "bold cyan")
    text.append(f"  {sample.plane_id[:8]}", "dim")
    text.append(f"   up {age_text(sample.uptime_s)}" if sample.uptime_s is not None else "")
    if sample.clients is not None:
        text.append(f"   {count_text(sample.clients)} client{'s' * (sample.clients != 1)}")
    text.append(f"   {time.strftime('%H:%M:%S', time.localtime(sample.at_s))}")
    if interval_s is not None:
        text.append(f"   every {age_text(interval_s)}, q ends", "dim")
    return text


def _stores(sample: Sample) -> Iterable[Text]:
    wide = max((len(short(visible(each["store_id"]), NAME)) for each in sample.stores), default=0)
    for store in sample.stores[:ROWS]:
        name = short(visible(store["store_id"]), NAME).ljust(wide)
        text = _line()
        text.append("store    ", "dim")
        text.append(f"{name}  ")
        if store["error"] or not store["capacity_bytes"]:
            text.append(short(visible(str(store["error"] or "does not answer")), 60), "bold red")
            yield text
            continue
        used, capacity = store["used_bytes"], store["capacity_bytes"]
        share = used / capacity
        style = "bold red" if share >= FULL else "yellow" if share >= NEARLY else "green"
        text.append(bar(share, BAR), f"{style} on grey23")
        text.append(f" {share_text(used, capacity):>5}", style)
        text.append(f"  {bytes_text(used)} of {bytes_text(capacity)}")
        if store["pins"]:
            text.append(f"  {count_text(store['pins'])} pins")
        if store["waiting"]:
            text.append(f"  {count_text(store['waiting'])} wait", "bold red")
        yield text
    yield from _left_out(sample.stores)


def _rates(sample: Sample) -> Iterable[Text]:
    rates = sample.rates
    text = _line()
    text.append("rows     ", "dim")
    if not rates:
        text.append("rates are known from the second look on", "dim")
        yield text
        return
    for name, word in RATES:
        if name in rates:
            text.append(f"{word} ")
            text.append(rate_text(rates[name]), "bold")
            text.append("  ")
    if "bytes_put" in rates:
        text.append(f"{bytes_text(rates['bytes_put'])}/s written")
    yield text
    changes = _line()
    changes.append("changes  ", "dim")
    changes.append(sparkline(sample.history[-HISTORY:]), "cyan")
    changes.append(f"  {rate_text(rates['changes'])}", "bold")
    yield changes


def _section(section: Section, limit: int) -> Iterable[Any]:
    title, rows, columns = section
    yield _line()
    if not rows:
        yield _line(f"no {title}", "dim")
        return
    table = new_table(columns)
    for row in rows[:limit]:
        cells = [column.show(row.get(column.name)) for column in columns]
        add_row(table, cells, _style(row))
    yield table
    yield from _left_out(rows, limit)


def _style(row: dict[str, Any]) -> str | None:
    """How urgent a row of any section is."""
    if row.get("alive") is False:
        return "bold red"
    quota = row.get("quota_bytes")
    is_short = quota and row["used_bytes"] >= NEARLY * quota
    waits_for_room = row.get("kind") == "room" or ("quota_bytes" in row and row["waiting"])
    return "yellow" if is_short or waits_for_room else None


def _left_out(rows: Sequence[object], limit: int = ROWS) -> Iterable[Text]:
    if len(rows) > limit:
        yield _line(f"and {count_text(len(rows) - limit)} more", "dim")


def _group(group: dict[str, Any]) -> dict[str, Any]:
    producer = group["producer"] or group.get("client_id", "")
    return {
        **group,
        "sessions": f"{group.get('sessions')} of {group.get('n')}",
        "producer": producer if group["alive"] else f"{producer} (gone)",
    }


def _line(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
