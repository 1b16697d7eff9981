"""Names that the drop-in takes for itself among those of its users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import Any

from dataplane.errors import InvalidRequest, quote

HIDDEN = "__transfer_queue__"
"""The partition in which an instance keeps what is its own; no listing shows it."""
RESERVED_TAG = "__tq__"
"""The tag under which the controller keeps a row's index and who consumed it; never shown."""
KEYLESS = "__row__:"
"""Begins the keys of rows that were put without one; never shown."""


def refuse_partition(partition_id: object) -> None:
    """InvalidRequest for the partition that is the drop-in's own."""
    if partition_id == HIDDEN:
        raise InvalidRequest(
            f"partition {HIDDEN!r} is where this instance keeps its own state: use another name"
        )


def refuse_keys(keys: Sequence[str]) -> None:
    """InvalidRequest for keys such as rows without a key have."""
    if any(map(methodcaller("startswith", KEYLESS), keys)):
        taken = [key for key in keys if key.startswith(KEYLESS)]
        raise InvalidRequest(
            f"keys that begin with {KEYLESS!r} are those of rows put without a key: "
            f"{quote(taken)}; use other names"
        )


def refuse_tags(tags: Iterable[Mapping[str, Any]]) -> None:
    """InvalidRequest for a tag by the name under which the controller keeps a row's index."""
    if RESERVED_TAG in chain.from_iterable(tags):
        raise InvalidRequest(
            f"the tag {RESERVED_TAG!r} is the controller's own: give it another name"
        )
