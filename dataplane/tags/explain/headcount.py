"""A headcount of a partition: how many rows or groups match, and what the others fail. Pure.

It walks over the rows in small steps, between which the store goes on: what changes meanwhile is
counted as it was or as it is. What it finds to hold things up it gives to `Holdups`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from dataplane.fields import LOST
from dataplane.tags.explain.holdups import STATUS, UNFINISHED, Failure, Holdups, status_of
from dataplane.tags.explain.losses import Losses
from dataplane.tags.explain.question import Allowance, Question
from dataplane.tags.explain.requirements import requirements
from dataplane.tags.explain.wording import many, quoted, without
from dataplane.tags.groups import FINISHED, Group
from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS, Row
from dataplane.tags.views.views import produced

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition

STEP = 256
"""Rows or groups of one step."""
COSTLY = 16_384
"""Rows times bytes of the predicate that are matched in one step, about."""
MAX_FAILING = 10
"""Requirements that are told, those that fail most often."""
IS_PROMPT = "is_prompt"
WHOLE = f"{quoted(LOST)} is absent"
"""The requirement that rows fail which are lost."""

Steps = Generator[None, None, None]


class _Failing(NamedTuple):
    """What a row fails."""

    text: str
    of_tags: bool
    """Whether it is a matter of its tags, and not of its fields alone."""


_OF_TAGS = _Failing("", of_tags=True)
_LOST = _Failing("lost", of_tags=False)


class _Tally:
    """What was seen of the rows of one finished group."""

    __slots__ = ("failed", "key", "requirement", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.failed = 0
        self.key = ""
        self.requirement = ""


class Headcount:
    def __init__(
        self, partition: Partition, question: Question, holdups: Holdups, allowance: Allowance
    ) -> None:
        self.total = 0
        """Rows that were looked at, or groups that there are."""
        self.matching = 0
        """Rows that match, or groups that are whole."""
        self.ready = 0
        """Those of them that the task has neither committed nor holds."""
        self.looked = 0
        """Rows that were looked at; of groups, where groups count."""
        self.is_cut = False
        """Whether there are rows that were not looked at."""
        self.ungrouped = 0
        """Rows that would match if they belonged to a group."""
        self._partition = partition
        self._question = question
        self._holdups = holdups
        self._allowance = allowance
        self._grouped = question.grouped
        self._match = question.predicate.match
        self._fields = question.fields
        self._task = None if question.task is None else partition.claims.tasks.get(question.task)
        self._requirements = requirements(question.predicate)
        self._of_status = [r.match for r in self._requirements if STATUS in r.tags]
        self._of_prompts = any(IS_PROMPT in r.tags for r in self._requirements)
        self._failings = [_Failing(r.text, of_tags=True) for r in self._requirements]
        self._failed = [0] * len(self._requirements)
        self._missing = dict.fromkeys(sorted(question.fields), 0)
        self._lacks: dict[tuple[str, ...], _Failing] = {}
        self.losses = None if question.predicate.names(LOST) else Losses()
        """Rows that match and are lost; None where lost rows count."""
        self._finished: list[Group] = []
        self._tallies: dict[Group, _Tally] = {}

    def take(self) -> Steps:
        """Look at everything there is, as far as the allowance goes."""
        for step, group in enumerate(list(self._partition.groups.values()), 1):
            self.total += self._grouped
            if group.status != FINISHED:
                self._holdups.add_group(self._partition, group)
            elif self._grouped:
                self._finished.append(group)
            if not step % STEP:
                yield
        yield from self._walk()
        for step, group in enumerate(self._finished, 1):
            self._judge(group)
            if not step % STEP:
                yield
        self._holdups.settle_rows(self._partition)

    def _walk(self) -> Steps:
        slots, allowance = self._partition.slots, self._allowance
        # What may be costly to match is matched in smaller steps.
        step = min(STEP, max(8, COSTLY // len(self._question.predicate.canonical)))
        for number in range(len(slots.chunks)):
            for start in range(0, CHUNK_ROWS, step):
                chunk = slots.chunks[number]
                if chunk is None or not chunk.live or start >= len(chunk.rows):
                    break
                if allowance.is_spent:
                    self.is_cut = True
                    return
                base = (number << CHUNK_BITS) + start
                for position, row in enumerate(chunk.rows[start : start + step], base):
                    if type(row) is Row:
                        allowance.taken += 1
                        self._look(position, row)
                yield
            yield

    def _look(self, position: int, row: Row) -> None:
        if not self._grouped:
            self.looked += 1
            self.total += 1
            failure = self._failure(row)
            if failure is None:
                self.matching += 1
                self.ready += self._task is None or not self._task.has(position)
            self._look_for_holdup(row, failure)
            return
        group = row.account
        if type(group) is Group:
            self.looked += 1
            failure = self._failure(row)
            if group.status == FINISHED:
                self._note(group, row, failure)
        elif self._match(row.tags) and not self._is_lost(row):
            is_prompt = row.tags.get(IS_PROMPT) is True
            self.ungrouped += not is_prompt and produced(row.layers, self._fields)
            self._look_for_holdup(row, None)
        else:
            self._look_for_holdup(row, _OF_TAGS)

    def _note(self, group: Group, row: Row, failure: _Failing | None) -> None:
        tally = self._tallies.get(group)
        if tally is None:
            tally = self._tallies[group] = _Tally()
        tally.rows += 1
        if failure is not None:
            tally.failed += 1
            if tally.failed == 1:
                tally.key, tally.requirement = row.key, failure.text

    def _failure(self, row: Row) -> _Failing | None:
        """What the row fails, the first of it; None if it is as it should be. All is counted."""
        tags = row.tags
        if self._match(tags):
            if self._is_lost(row):
                return _LOST
            return None if produced(row.layers, self._fields) else self._lack(row)
        if len(self._failings) == 1:
            self._failed[0] += 1
            return self._failings[0]
        first = None
        for i, requirement in enumerate(self._requirements):
            if not requirement.match(tags):
                self._failed[i] += 1
                first = first or self._failings[i]
        return first

    def _is_lost(self, row: Row) -> bool:
        """Whether a row that matches does not count, because it is lost. It is noted."""
        if self.losses is None or LOST not in row.tags:
            return False
        self.losses.add(row)
        return True

    def _lack(self, row: Row) -> _Failing:
        have = {name for placement in row.layers[::2] for name in placement.template.names}
        missing = tuple([name for name in self._missing if name not in have])
        for name in missing:
            self._missing[name] += 1
        failing = self._lacks.get(missing)
        if failing is None:
            failing = self._lacks[missing] = _Failing(without(missing), of_tags=False)
        return failing

    def _look_for_holdup(self, row: Row, failure: _Failing | None) -> None:
        """Note a row that holds things up: a prompt that is not finished, or a row that has all but
        the right status, or all but some fields. Rows of groups that have not finished are none of
        these: there it is the group."""
        tags = row.tags
        is_prompt = tags.get(IS_PROMPT) is True
        if failure is _LOST or (is_prompt and row.key in self._partition.groups):
            return
        status = tags.get(STATUS)
        if is_prompt and status in UNFINISHED:
            self._holdups.add_row(row, status_of(row))
        elif failure is None:
            return
        elif not failure.of_tags:
            self._holdups.add_row(row, failure.text)
        elif (
            (is_prompt or STATUS in tags)
            and type(row.account) is not Group
            # A prompt that is done is none, unless the question is about prompts.
            and (self._of_prompts or not (is_prompt and status == FINISHED))
            and not (self._of_status and all(match(tags) for match in self._of_status))
        ):
            self._holdups.add_row(row, status_of(row))

    def _judge(self, group: Group) -> None:
        """Whether a finished group is whole, as far as its rows were looked at."""
        tally = self._tallies.get(group)
        if tally is None:
            return
        if tally.failed:
            failure = Failure(tally.rows, tally.failed, tally.key, tally.requirement)
            self._holdups.add_group(self._partition, group, failure)
        elif tally.rows == len(group.positions):
            self.matching += 1
            self.ready += self._task is None or not any(map(self._task.has, group.positions))

    # -- telling -----------------------------------------------------------------------------

    def failing(self) -> dict[str, int]:
        """What rows fail and how many of them, that which fails most often first."""
        failing = {
            requirement.text: failed
            for requirement, failed in zip(self._requirements, self._failed, strict=True)
            if failed
        }
        failing.update((_field(name), count) for name, count in self._missing.items() if count)
        if self.losses:
            failing[WHOLE] = self.losses.count
        return dict(sorted(failing.items(), key=lambda item: -item[1])[:MAX_FAILING])

    def lines(self) -> list[str]:
        """All of it in words."""
        question, partition = self._question, self._partition
        what = "groups are whole and match" if self._grouped else "rows match"
        text = f"partition {quoted(partition.partition_id)}: {self.matching} of {self.total} {what}"
        if question.task is not None:
            text += f", {self.ready} of them ready for task {quoted(question.task)}"
        if question.wanted is not None:
            text += f"; {question.wanted} wanted"
        if partition.sealed:
            text += "; it is sealed and takes no new row"
        lines = [text]
        if self.is_cut:
            looked = f"only the first {self.looked}" if self.looked else "none"
            lines.append(f"  {looked} of {many(len(partition), 'row')} could be looked at in time")
        lines += self._failing_lines()
        if self.losses:
            lines.append(f"  {self.losses.told(self._holdups.now)}")
        if self.ungrouped:
            lines.append(
                f"  {self.ungrouped} rows would match but belong to no group: they were put "
                "without attempt="
            )
        return lines

    def _failing_lines(self) -> list[str]:
        failing = self.failing()
        fields = {_field(name) for name in self._missing}
        lines: list[str] = []
        for what, count in failing.items():
            if what == WHOLE:
                continue  # it has a line of its own
            if what in fields:
                where = " that match otherwise" if self._requirements else ""
                lines.append(f"  {what} is missing on {many(count, 'row')}{where}")
            else:
                lines.append(f"  {what}: {count} of {self.looked} rows fail{'s' * (count == 1)}")
        more = sum(map(bool, [*self._failed, *self._missing.values()])) - len(failing)
        more += WHOLE in failing
        if more:
            lines.append(f"  and {more} conditions more, each for fewer rows")
        return lines


def _field(name: str) -> str:
    return f"field {quoted(name)}"
