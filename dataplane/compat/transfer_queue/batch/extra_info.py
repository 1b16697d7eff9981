"""What is said about a batch as a whole: one dictionary beside its rows, and how two of them meet.

Tensors and arrays are compared by their values without an import of their libraries, so that a
process that only passes batches on needs neither.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

log = logging.getLogger("transfer_queue.metadata")


def merged(infos: Sequence[Mapping[str, Any] | None], *, of: str) -> dict[str, Any]:
    """All entries of these, where those of one name are equal; values are not copied.

    Raises ValueError for a name that has different values; `of` says whose they are.
    """
    united: dict[str, Any] = {}
    first: dict[str, int] = {}  # which of them said it first, for the error
    for place, info in enumerate(infos):
        for name, value in (info or {}).items():
            if name not in united:
                united[name] = value
                first[name] = place
            elif not same(united[name], value):
                raise ValueError(
                    f"{of}: extra_info {name!r} has conflicting values in batches {first[name]} "
                    f"and {place}: {united[name]!r} and {value!r}. Set it on one of them, or after"
                )
    names = {frozenset(info or {}) for info in infos}
    if len(names) > 1:
        log.warning("%s: not all batches have the same extra_info; the result has all of it", of)
    return united


def same(one: Any, other: Any) -> bool:
    """Whether two values say the same. NaN is equal to NaN: a batch that was cut fits together."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(value, other[name]) for name, value in cast(dict[Any, Any], one).items()
        )
    if isinstance(one, list | tuple):
        items = cast(Sequence[Any], one)
        return len(items) == len(other) and all(
            same(a, b) for a, b in zip(items, other, strict=True)
        )
    try:
        # Without this, arrays of different shapes could be stretched to fit each other.
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        equal = one == other
        if not hasattr(equal, "all"):
            return bool(equal) or bool(one != one and other != other)
        return bool((equal | ((one != one) & (other != other))).all())
    except Exception:
        # What cannot be compared is not known to be equal.
        return False
