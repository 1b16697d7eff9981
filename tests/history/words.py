"""How it is said what is wrong with a history."""

from __future__ import annotations

from typing import NamedTuple

from dataplane.errors import DataplaneError
from tests.history.record import History, Op


class Illegal(NamedTuple):
    """Why a history is not legal."""

    rule: str
    what: str


class Broken(Exception):
    """Ends a check: the history is not legal."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(what)
        self.illegal = Illegal(rule, what)


def revision_of(op: Op) -> int:
    """The revision that a call was answered with."""
    if op.revision is None:
        raise Broken("order", f"{tell(op)} was answered without a revision")
    return op.revision


def tell(op: Op) -> str:
    """A call in words, for whoever reads why a history is not legal."""
    parts = {
        name: getattr(op, name)
        for name in ("keys", "uid", "attempt", "where", "retire", "count", "grouped", "commit")
        if getattr(op, name, None) not in (None, False)
    }
    said = ", ".join(f"{name}={value}" for name, value in parts.items())
    return f"{op.client}'s {type(op).__name__.lower()}({said}) [{op.begin}-{op.end}]"


def tell_error(error: DataplaneError | None) -> str:
    """An error with what it says in attributes."""
    if error is None:
        return "nothing"
    said = {name: getattr(error, name) for name in error.attributes}
    return f"{type(error).__name__} {said}: {error}"


def story(history: History) -> str:
    """A history in words, a line for each call, in the order in which they were made."""
    lines = [f"from revision {history.first} to {history.last}"]
    for op in sorted(history.ops, key=lambda op: op.begin):
        told = tell_error(op.error) if op.error is not None else f"revision {op.revision}"
        noted = {
            name: getattr(op, name)
            for name in ("fields", "tags", "rows", "removed", "begun", "broken", "claim_id")
            if getattr(op, name, None)
        }
        lines.append(f"{tell(op)}: {told} {noted}")
    lines += [
        f"{away.client} was away [{away.begin}-{away.end}] for {away.seconds:.3f} s"
        for away in history.away
    ]
    return "\n".join(lines)
