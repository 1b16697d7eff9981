"""Batches that several ranks train on together: how one is split, and who has which share. Pure.

The first rank that asks for a batch draws all of it; every replica of a rank gets that rank's
share. Which rows are drawn is for claims.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgpack

from dataplane.errors import InvalidRequest
from dataplane.tags.rows import Row
from dataplane.types import FieldSchema

if TYPE_CHECKING:
    from dataplane.tags.claims.leases import Granted
    from dataplane.tags.placement import Placement

MAX_RANKS = 4096

SEQ_LEN = "seq_len"
"""The tag that says how many tokens a row has."""


class Rank(NamedTuple):
    """Whose share of which batch is asked for."""

    dp_rank: int
    dp_size: int
    batch_index: int

    @classmethod
    def parse(cls, replica: object) -> Rank | None:
        """`replica=(dp_rank, dp_size, batch_index)`, or None."""
        if replica is None:
            return None
        parts = cast("Sequence[object]", replica)
        if type(replica) not in (list, tuple) or len(parts) != 3 or set(map(type, parts)) != {int}:
            raise InvalidRequest(
                f"replica is (dp_rank, dp_size, batch_index), three integers, not {replica!r:.80}"
            )
        rank = cls(*cast("Sequence[int]", parts))
        if not 0 < rank.dp_size <= MAX_RANKS:
            raise InvalidRequest(
                f"replica: dp_size is a number of ranks, 1 to {MAX_RANKS}, not {rank.dp_size}"
            )
        if not 0 <= rank.dp_rank < rank.dp_size:
            raise InvalidRequest(
                f"replica: dp_rank is 0 to {rank.dp_size - 1} of dp_size {rank.dp_size}, not "
                f"{rank.dp_rank}"
            )
        if not 0 <= rank.batch_index < 1 << 63:
            raise InvalidRequest(
                f"replica: batch_index is the number of the step, from 0 on, not {rank.batch_index}"
            )
        return rank


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks have to agree on that ask for one batch."""

    dp_size: int
    count: int
    fields: tuple[str, ...]
    where: bytes
    order_by: str | None
    groups: bool

    def check(self, task: str, batch_index: int, others: Terms) -> None:
        """InvalidRequest names what others do not agree on, theirs and what came first."""
        for name, mine, theirs in zip(_TERMS, astuple(self), astuple(others), strict=True):
            if mine != theirs:
                raise InvalidRequest(
                    f"batch {batch_index} of task {task!r} was first asked for with {name}="
                    f"{_shown(name, mine)!r:.200}, and now with {name}="
                    f"{_shown(name, theirs)!r:.200}: all ranks of a batch ask for the same"
                )


_TERMS = tuple(field.name for field in fields(Terms))


def _shown(name: str, value: Any) -> Any:
    if name == "where":
        return msgpack.unpackb(value)
    return list(value) if name == "fields" else value


class Share:
    """What one rank gets of a batch."""

    __slots__ = ("asked", "granted")

    def __init__(self, granted: Granted) -> None:
        self.granted = granted
        self.asked = False
        """Whether a replica of the rank has it."""


class Batch:
    """One batch of a task."""

    __slots__ = ("shares", "terms", "waiting")

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.shares: list[Share] | None = None
        """By rank; None until it is drawn, and empty if there was nothing left to draw."""
        self.waiting = 0
        """Requests that wait for it to be drawn."""


def split(tokens: Sequence[int], parts: int) -> list[list[int]]:  # [parts][items of the part]
    """Which items each part gets: sizes differ by at most one, token totals by at most the tokens
    of the largest item. Items keep their order within a part.

    Dealt in rounds, the largest items first; in each round whoever has the least gets the most.
    So a round sets no two parts farther apart than its own items are, or than they were before.

    Example: [9, 7, 6, 5, 4, 3] in 2 parts are [0, 3, 5] and [1, 2, 4]: 17 tokens each.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    largest_first = sorted(range(len(tokens)), key=lambda item: (-tokens[item], item))
    for at in range(0, len(tokens), parts):
        least_first = sorted(range(parts), key=lambda part: (totals[part], part))
        for item, part in zip(largest_first[at : at + parts], least_first, strict=False):
            shares[part].append(item)
            totals[part] += tokens[item]
    return [sorted(share) for share in shares]


def tokens_of(row: Row, field: str | None, field_schema: FieldSchema | None) -> int:
    """What a row weighs: its tag `seq_len`, else its length in the field, else 1."""
    tag = row.tags.get(SEQ_LEN)
    if type(tag) is int and tag >= 0:
        return tag
    if field is None or field_schema is None or field_schema.ragged_dim is None:
        return 1
    length = _length(row, field, field_schema.ragged_dim)
    return 1 if length is None else length


def _length(row: Row, field: str, ragged_dim: int) -> int | None:
    for k in range(0, len(row.layers), 2):
        placement: Placement = row.layers[k]
        template = placement.template
        c = template.index.get(field)
        if c is None:
            continue
        column = template.columns[c]
        if ragged_dim >= len(column.dims):
            return None
        size: int = column.dims[ragged_dim]
        if size >= 0:
            return size
        free = template.first_free[c] + column.free.index(ragged_dim)
        place: int = row.layers[k + 1]
        return int(memoryview(placement.lengths).cast("i")[free * placement.rows + place])
    return None
