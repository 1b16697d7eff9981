"""What a claim asks for, as it travels. Pure: owns what each argument may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from dataplane.codec.shapes import MAX_COLUMNS
from dataplane.errors import InvalidRequest
from dataplane.tags.claims.leases import MAX_LEASE_S, MIN_LEASE_S
from dataplane.tags.claims.queues import Order
from dataplane.tags.claims.shares import Rank
from dataplane.tags.keys import MAX_KEYS, check_name
from dataplane.tags.query import Predicate, compile_where
from dataplane.tags.views.views import Condition, condition_of

MAX_NUMBERS = 65_536
"""Requests given up that one request names."""


@dataclass(frozen=True, slots=True)
class Want:
    """A claim that is well formed."""

    partition_id: str
    task: str
    count: int
    """Rows, or groups; of the whole batch where it is asked for by rank."""
    fields: list[str]
    """In the order in which they were named: the length of the first may weigh a row."""
    predicate: Predicate
    condition: Condition
    order: Order
    lease_s: float
    rank: Rank | None

    @classmethod
    def parse(
        cls,
        partition_id: object,
        task: object,
        count: object,
        fields: object,
        where: Any,
        order_by: object,
        groups: object,
        lease_s: object,
        replica: object,
    ) -> Want:
        """InvalidRequest names the argument that will not do."""
        name = check_name(partition_id, "partition name")
        by = check_name(task, "task name")
        if type(count) is not int or not 0 < count <= MAX_KEYS:
            raise InvalidRequest(
                f"count is a number of rows or groups, 1 to {MAX_KEYS}, not {count!r:.80}"
            )
        if type(fields) is not list or not all(
            type(field) is str and field for field in cast("list[object]", fields)
        ):
            raise InvalidRequest(f"fields is a list of field names, not {fields!r:.80}")
        names = list(dict.fromkeys(cast("list[str]", fields)))
        if len(names) > MAX_COLUMNS:
            raise InvalidRequest(
                f"fields names {len(names)} fields; a row has at most {MAX_COLUMNS}"
            )
        if type(groups) is not bool:
            raise InvalidRequest(f"groups is true or false, not {groups!r:.80}")
        if type(lease_s) not in (int, float) or not (
            MIN_LEASE_S <= cast("float", lease_s) <= MAX_LEASE_S
        ):
            raise InvalidRequest(
                f"lease_s is seconds from {MIN_LEASE_S:g} to {MAX_LEASE_S:g}, not {lease_s!r:.80}"
            )
        predicate = compile_where(where)
        condition = condition_of(predicate, frozenset(names), grouped=groups)
        return cls(
            name, by, count, names, predicate, condition, Order.parse(order_by),
            float(cast("float", lease_s)), Rank.parse(replica),
        )  # fmt: skip


def check_numbers(numbers: object, what: str) -> list[int]:
    """Request numbers. InvalidRequest if they are none."""
    listed = cast("list[object]", numbers)
    if type(numbers) is not list or len(listed) > MAX_NUMBERS:
        raise InvalidRequest(f"{what}: a list of up to {MAX_NUMBERS} request numbers is due")
    return [check_number(number, what) for number in listed]


def check_number(number: object, what: str) -> int:
    """A request's number. InvalidRequest if it is none."""
    if type(number) is not int or not 0 < number < 1 << 63:
        raise InvalidRequest(f"{what}: a request number is a positive integer, not {number!r:.80}")
    return number
