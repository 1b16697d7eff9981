"""What must hold in the life of a group, judged from its requests; what fails names the two that
disagree. Pure.

The rules are those of docs/trace.md, by their numbers. What a rule needs and no request tells (the
trainer's ranks, its staleness bound, other groups) is said instead of a judgement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from dataplane.errors import quote
from dataplane.lineage.lengths import ADVANTAGES, expected_lengths
from dataplane.lineage.life import Cell, Life
from dataplane.lineage.rows import Finding, TraceRow
from dataplane.lineage.rules import NOT_JUDGED, RULES

FINAL: Final = ("finished", "failure")
_FOLLOWS: Final[Mapping[str | None, tuple[str, ...]]] = {
    None: ("pending", "running", *FINAL),
    "pending": ("pending", "running", "failure"),
    "running": ("running", "pending", *FINAL),
    "finished": ("finished",),
    "failure": ("failure",),
}
"""Which status of a prompt may come after which, within one attempt. One that is running is pending
again when another worker is to begin it anew."""
_UNREAD: Final = ("reward", "metrics")
"""Stages in which a padding row must not be read."""


class Checks:
    """What was found so far."""

    def __init__(self, lives: Mapping[tuple[str, str], Life], uid: str | None) -> None:
        self.hashed = False
        """Whether values were hashed."""
        self._lives = lives
        self._uid = uid
        self._judged: set[int] = set()
        self._failures: dict[tuple[Any, ...], Finding] = {}
        self._ended: TraceRow | None = None
        """What gave the group its last status, until it begins anew."""
        self._swept: TraceRow | None = None
        """The last clear of a trajectory since it ended."""
        self._places: dict[tuple[Any, Any], tuple[str, TraceRow]] = {}
        """Session and index of each trajectory that is there: its key, and where it was put."""
        self._hashes: dict[tuple[str, str], str] = {}
        """The key of which each value was, by field and hash."""

    # -- what happens ------------------------------------------------------------------------

    def changed(self, life: Life, row: TraceRow) -> None:
        """A put is done with a row."""
        self._lengths(life, row)
        self._counts(life, row)
        if life.is_padding:
            self._padding(life, row)
        elif self._is_trajectory(life):
            self._identity(life, row)
            if life.made is row:
                self._came(life, row)
        if life.is_prompt and life.tag("session_id") is not None:
            self._judged.add(11)
            first, second = life.wrote.get("is_prompt", row), life.wrote.get("session_id", row)
            self._fail(
                11, (life.key,), f"key {quote([life.key])} is a prompt's and has a session_id",
                first, second,
            )  # fmt: skip

    def tagged(self, life: Life, before: Mapping[str, Any], row: TraceRow) -> None:
        """Tags were merged into a row's."""
        uid = before.get("uid")
        if uid is not None and life.tags.get("uid") != uid:
            self._judged.add(2)
            self._fail(
                2, (life.key, "uid"),
                f"key {quote([life.key])} had uid {quote([uid])}, and was given "
                f"{quote([life.tags.get('uid')])}",
                life.wrote.get("uid", row), row,
            )  # fmt: skip
        if not life.is_prompt or "status" not in (row.tags or {}) or not self._is_own(life):
            return
        status = life.tags["status"]
        if row.op == "begin" or status == "pending":
            self.begun(life)
        if row.op != "begin":
            self._moved(life, before.get("status"), status, row)
        if status in FINAL:
            self.ended(life, row)

    def begun(self, life: Life) -> None:
        """A group begins, or begins anew: what follows is another attempt's."""
        if self._is_own(life):
            self._ended = self._swept = None
            self._places.clear()

    def ended(self, life: Life, row: TraceRow) -> None:
        """A group has its last status."""
        if self._is_own(life) and self._ended is None:
            self._ended = row
            self._judged.add(11)

    def cleared(self, rows: Sequence[TraceRow]) -> None:
        """Rows were cleared by one request."""
        for row in rows:
            self._places = {p: of for p, of in self._places.items() if of[0] != row.key}
            life = self._lives[row.partition, row.key]
            mine = row.uid == self._uid and row.session_id is not None and not row.is_padding
            if mine and self._ended is not None and life.cleared is row:
                self._swept = row
                self._judged.add(10)

    def read(self, life: Life, stage: str, row: TraceRow | None) -> None:
        """A row was read."""
        if not life.is_padding or row is None:
            return
        self._judged.add(4)
        if stage in _UNREAD:
            self._fail(
                4, (life.key, stage),
                f"padding row {quote([life.key])} was read by stage {stage!r}",
                life.made or row, row,
            )  # fmt: skip

    def compared(self, life: Life, cell: Cell, row: TraceRow) -> None:
        """A value was read whose hash is known, as it was put and as it was got."""
        if not cell.hash:
            return
        self._judged |= {5, 8}
        self._hashes.setdefault((row.field, cell.hash), life.key)
        if row.hash == cell.hash:
            return
        other = self._whose(row.field, row.hash)
        if other is not None and other != life.key:
            text = (
                f"field {row.field!r} of key {quote([life.key])} was read as the value of key "
                f"{quote([other])}"
            )
            self._fail(5, (life.key, row.field, row.number), text, cell.row, row)
        else:
            text = (
                f"field {row.field!r} of key {quote([life.key])} was put with hash {cell.hash} and "
                f"read with hash {row.hash}"
            )
            self._fail(8, (life.key, row.field, row.number), text, cell.row, row)

    # -- what comes of it --------------------------------------------------------------------

    def left_over(self) -> list[str]:
        """Keys of trajectories that are there, though others were cleared after the group ended."""
        return [life.key for life in self._left()]

    def findings(self, *, complete: bool) -> list[Finding]:
        """What each rule says."""
        for life in self._left():
            assert self._swept is not None
            self._fail(
                10, (life.key,),
                f"key {quote([life.key])} is still there after others of its group were cleared",
                self._swept, life.made or self._swept,
            )  # fmt: skip
        found: list[Finding] = []
        for rule, name in RULES.items():
            failures = [finding for finding in self._failures.values() if finding.rule == rule]
            if failures:
                found += failures
            elif rule in self._judged:
                text = "" if complete else "of the requests that are remembered"
                found.append(Finding(rule, name, "ok", text))
            else:
                found.append(Finding(rule, name, "not judged", NOT_JUDGED[rule]))
        return found

    def _left(self) -> list[Life]:
        if self._swept is None:
            return []
        return [
            life
            for life in self._lives.values()
            if self._is_trajectory(life) and (life.exists or (life.today and not life.gen))
        ]

    def _fail(
        self, rule: int, what: tuple[Any, ...], text: str, first: TraceRow, second: TraceRow
    ) -> None:
        one, other = sorted((first, second), key=lambda row: row.number)
        text = f"{text}: {_named(one)} and {_named(other)} disagree"
        found = Finding(rule, RULES[rule], "failed", text, [one.number, other.number])
        self._failures.setdefault((rule, *what), found)

    # -- rules -------------------------------------------------------------------------------

    def _is_own(self, life: Life) -> bool:
        return self._uid is not None and life.key == self._uid

    def _is_trajectory(self, life: Life) -> bool:
        return (
            self._uid is not None and life.tag("uid") == self._uid
            and not life.is_prompt and not life.is_padding
        )  # fmt: skip

    def _lengths(self, life: Life, row: TraceRow) -> None:
        """1 and 9."""
        for name, cell in life.cells.items():
            last = None if not cell.row.shape else cell.row.shape[-1]
            have = last if name == "position_ids" else cell.row.len
            expected = expected_lengths(name, life.tags)
            if have is None or not expected:
                continue
            rule = 9 if name in ADVANTAGES else 1
            self._judged.add(rule)
            if have not in expected.values():
                due = " or ".join(f"{tag} {length}" for tag, length in expected.items())
                tag = next(iter(expected)).split()[0]
                self._fail(
                    rule, (life.key, life.gen, name),
                    f"field {name!r} of key {quote([life.key])} has {have} entries, and its tags "
                    f"say {due}",
                    cell.row, life.wrote.get(tag, row),
                )  # fmt: skip

    def _counts(self, life: Life, row: TraceRow) -> None:
        """3."""
        policy = life.number("policy_len")
        if policy is None:
            return
        self._judged.add(3)
        wrote = life.wrote.get("policy_len", row)
        for tag, less in (("response_len", 0), ("seq_len", 1)):
            most = life.number(tag)
            if most is not None and not 0 <= policy <= max(0, most - less):
                text = f"key {quote([life.key])} has policy_len {policy} and {tag} {most}"
                self._fail(3, (life.key, life.gen, tag), text, wrote, life.wrote.get(tag, row))
        total = _total(life.tags.get("policy_spans"))
        if total is not None and total != policy:
            text = (
                f"key {quote([life.key])} has policy_len {policy}, and its policy_spans sum to "
                f"{total}"
            )
            spans = life.wrote.get("policy_spans", row)
            self._fail(3, (life.key, life.gen, "policy_spans"), text, wrote, spans)

    def _padding(self, life: Life, row: TraceRow) -> None:
        """4."""
        self._judged.add(4)
        policy = life.number("policy_len")
        if policy:
            self._fail(
                4, (life.key, "policy_len"),
                f"padding row {quote([life.key])} has policy_len {policy}",
                life.wrote.get("is_padding", row), life.wrote.get("policy_len", row),
            )  # fmt: skip

    def _identity(self, life: Life, row: TraceRow) -> None:
        """2."""
        session, index = life.number("session_id"), life.number("index")
        if session is None:
            return
        self._judged.add(2)
        other, where = self._places.setdefault((session, index), (life.key, row))
        if other != life.key:
            self._fail(
                2, (session, index),
                f"keys {quote([other, life.key])} are both session {session}, index {index}",
                where, row,
            )  # fmt: skip
        prompt = self._lives.get((life.partition, self._uid or ""))
        due = None if prompt is None else prompt.number("n")
        if prompt is not None and due is not None and not 0 <= session < due:
            self._fail(
                2, (life.key, "n"),
                f"key {quote([life.key])} is of session {session}, and its group has {due}",
                prompt.wrote.get("n", row), row,
            )  # fmt: skip

    def _came(self, life: Life, row: TraceRow) -> None:
        """10 and 11: a trajectory comes to be."""
        if self._ended is None:
            return
        if life.cleared is not None and life.cleared.number > self._ended.number:
            self._judged.add(10)
            text = f"key {quote([life.key])} was written again after it was cleared"
            self._fail(10, (life.key, life.gen), text, life.cleared, row)
        else:
            text = f"key {quote([life.key])} came to be after its group had ended"
            self._fail(11, (life.key, life.gen), text, self._ended, row)

    def _moved(self, life: Life, before: Any, status: Any, row: TraceRow) -> None:
        """12."""
        self._judged.add(12)
        known = before if before in _FOLLOWS else None
        if status not in _FOLLOWS[known]:
            self._fail(
                12, (life.key, row.number),
                f"the prompt {quote([life.key])} went from status {before!r:.80} to {status!r:.80}",
                life.wrote.get("status", row), row,
            )  # fmt: skip

    def _whose(self, field: str, digest: str) -> str | None:
        for life in self._lives.values():
            cell = life.cells.get(field)
            if cell is not None and cell.hash == digest:
                return life.key
        return self._hashes.get((field, digest))


def _total(spans: object) -> int | None:
    """The supervised tokens of all policy versions; None if that is no list of spans."""
    if not isinstance(spans, list):
        return None
    total = 0
    for span in cast("list[Any]", spans):
        if not isinstance(span, list) or len(cast("list[Any]", span)) != 2:
            return None
        count: Any = cast("list[Any]", span)[1]
        if type(count) is not int:
            return None
        total += count
    return total


def _named(row: TraceRow) -> str:
    """A request in the text of a finding."""
    field = f" {row.field}" if row.field else ""
    return f"#{row.number} {row.op}{field} (r{row.n})"
