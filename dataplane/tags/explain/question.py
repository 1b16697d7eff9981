"""The question of an explanation: what is waited for, and how much may be looked at. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from dataplane.errors import InvalidRequest
from dataplane.tags.keys import check_name
from dataplane.tags.query import Predicate, compile_where

MAX_ROWS = 200_000
"""Rows that are looked at for one answer."""
FIRST_ROWS = 256
"""Rows for which there is always time."""
MAX_FIELDS = 1024


@dataclass(frozen=True, slots=True)
class Question:
    """What is waited for in a partition; or, without one, how the whole plane is."""

    partition_id: str | None
    predicate: Predicate
    fields: frozenset[str]
    grouped: bool
    task: str | None
    wanted: int | None
    """How many rows, or groups; None if that was not said."""
    among: frozenset[str] | None = None
    """Partitions that are spoken of; None for all."""

    @classmethod
    def checked(
        cls,
        partition_id: object,
        where: Any,
        fields: object,
        task: object,
        grouped: object,
        count: object,
        among: object = None,
    ) -> Question:
        """The question that travelled. InvalidRequest names what is wrong with it."""
        if partition_id is None and not (
            where is None and fields == [] and task is None and grouped is False and count is None
        ):
            raise InvalidRequest(
                "where, fields, task, group_by and count are about one partition: name it too"
            )
        if type(fields) is not list or not {type(f) for f in cast("list[Any]", fields)} <= {str}:
            raise InvalidRequest("fields is a list of field names")
        names = cast("list[str]", fields)
        if len(names) > MAX_FIELDS:
            raise InvalidRequest(f"at most {MAX_FIELDS} fields are asked for, not {len(names)}")
        if type(grouped) is not bool:
            raise InvalidRequest(f"grouped is true or false, not {grouped!r:.80}")
        if count is not None and (type(count) is not int or not 0 < count < 1 << 63):
            raise InvalidRequest(f"count is a number from 1 on, not {count!r:.80}")
        if among is not None and (
            type(among) is not list or not {type(n) for n in cast("list[Any]", among)} <= {str}
        ):
            raise InvalidRequest("the partitions that are spoken of are a list of names")
        return cls(
            None if partition_id is None else check_name(partition_id, "partition name"),
            compile_where(where),
            frozenset(names),
            grouped,
            None if task is None else check_name(task, "task"),
            count,
            None if among is None else frozenset(cast("list[str]", among)),
        )


class Allowance:
    """How many rows may be looked at."""

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self.limit = limit
        self.taken = 0
        """Rows that were looked at."""

    @property
    def is_spent(self) -> bool:
        """Whether the looking is to end."""
        return self.taken >= self.limit

    def hurry(self) -> None:
        """There is no time left: not more than the first few rows."""
        self.limit = min(self.limit, FIRST_ROWS)
