"""A log record as one line: of text for people, or of JSON for what collects them.

Both say the same facts under the same names. A fact beside the event is given to a logger as
`extra={"partition": …}`; those that have a place in a line are in `FACTS`, others are left out.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from dataplane.logs.escaping import FACT_CHARS, TRACE_CHARS, Secrets, one_line

FACTS: Final = (
    "partition", "keys", "rows", "bytes", "client", "peer", "store", "uid", "attempt", "task",
    "verb", "status", "error",
)  # fmt: skip
"""Names of facts beside an event, in the order in which they are shown. `keys` is how many, never
which; `error` is the class of what went wrong."""

PLACE: Final = ("plane", "plane_id", "role")
"""What is the same in all lines of a process."""


class _Lines(logging.Formatter):
    """What both forms share. Never raises: a line that cannot be made is a line that says so."""

    def __init__(self, place: Mapping[str, str], secrets: Secrets) -> None:
        super().__init__()
        self._place = {name: place[name] for name in PLACE if place.get(name)}
        self._secrets = secrets

    def facts_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """The facts of a record that are known, by name."""
        facts: dict[str, Any] = {}
        for name in FACTS:
            value = record.__dict__.get(name)
            if value is None and name == "error":
                value = _error_class(record)
            if value is not None:
                number = type(value) in (int, float, bool)
                facts[name] = value if number else self._cleaned(str(value), FACT_CHARS)
        return facts

    def event_of(self, record: logging.LogRecord) -> str:
        """What the record says, on one line."""
        try:
            event = record.getMessage()
        except Exception:  # arguments that do not fit, or that cannot be shown
            event = f"{record.msg} (its arguments do not fit: {len(record.args or ())})"
        return self._cleaned(event)

    def trace_of(self, record: logging.LogRecord) -> str | None:
        """The traceback of a record, if it has one; several lines, each escaped."""
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1]))
        elif record.exc_text:
            lines = record.exc_text
        else:
            return None
        cleaned = self._secrets.removed(lines.rstrip())
        if len(cleaned) > TRACE_CHARS:
            cleaned = f"...{cleaned[-TRACE_CHARS:]}"  # the end says what happened
        return "\n".join(one_line(line) for line in cleaned.splitlines())

    def _cleaned(self, text: str, limit: int | None = None) -> str:
        text = self._secrets.removed(text)
        return one_line(text) if limit is None else one_line(text, limit)


class JsonLines(_Lines):
    """One object a line: ts, level, logger, event, plane, plane_id, role, pid, facts, traceback."""

    def __init__(
        self, place: Mapping[str, str], secrets: Secrets, *, ascii_only: bool = False
    ) -> None:
        """`ascii_only` for a stream that would escape other letters itself: not as JSON does."""
        super().__init__(place, secrets)
        self._ascii_only = ascii_only

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "ts": moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": self.event_of(record),
            **self._place,
            "pid": record.process,
            **self.facts_of(record),
        }
        trace = self.trace_of(record)
        if trace is not None:
            line["traceback"] = trace
        return json.dumps(line, ensure_ascii=self._ascii_only)


class TextLines(_Lines):
    """Time, level, logger, facts, then the event: text of others comes after all that is ours."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        facts = {**self._place, "pid": record.process, **self.facts_of(record)}
        shown = " ".join(f"{name}={_bare(value)}" for name, value in facts.items())
        line = (
            f"{moment(record.created)} {record.levelname:<7} {record.name} [{shown}] "
            f"{self.event_of(record)}"
        )
        trace = self.trace_of(record)
        return line if trace is None else f"{line} | {one_line(trace, 2 * TRACE_CHARS)}"


def moment(unix_s: float) -> str:
    """A moment as RFC 3339 has it, in UTC and to the microsecond."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _bare(value: object) -> str:
    """A fact as it stands after its name: quoted where it could be taken for more than one."""
    text = str(value)
    plain = text and not any(char in " =\"'[]" for char in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _error_class(record: logging.LogRecord) -> str | None:
    """The class of the error that a record is about."""
    if record.exc_info and record.exc_info[0] is not None:
        return record.exc_info[0].__name__
    given = record.args if isinstance(record.args, tuple) else ()
    return next((type(arg).__name__ for arg in given if isinstance(arg, BaseException)), None)
