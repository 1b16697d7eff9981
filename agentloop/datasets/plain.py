"""Plain data of what a dataset holds, and back: rows travel between processes as JSON or msgpack.

Plain is None, bool, str, float, bytes, int of 64 bits, and lists and string-keyed maps of those.
`plain` is for rows to be read; `marked` keeps what a program needs to get its own values back.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

_TUPLE: Final = "$tuple"
_MAP: Final = "$map"
_INT: Final = "$int"


def plain(value: Any) -> Any:
    """The value as plain data. Tuples become lists, dates ISO text, decimals and large ints text.

    Raises:
        TypeError: something in it has no plain form.
    """
    if value is None or isinstance(value, str | bytes | float | bool):
        return value
    if isinstance(value, int):
        return value if _small(value) else str(value)
    if isinstance(value, Mapping):
        return {_name(k): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    listed = getattr(value, "tolist", None)
    if callable(listed):
        return plain(listed())
    raise TypeError(f"a {type(value).__name__} is no plain data")


def marked(value: Any) -> Any:
    """Plain data that `unmarked` turns into an equal value of the same types.

    Scalars of numpy become Python's.

    Example: marked((1, 2)) == {"$tuple": [1, 2]}, marked({3: "a"}) == {"$map": [[3, "a"]]}.

    Raises:
        TypeError: something in it has no such form.
    """
    if isinstance(value, np.generic):
        return marked(cast(Any, value).item())
    # By exact type: a subclass would not come back as itself.
    kind = cast(type[Any], type(value))
    if value is None or kind in (str, float, bool):
        return value
    if kind is int:
        return value if _small(value) else {_INT: str(value)}
    if kind is list:
        return [marked(v) for v in value]
    if kind is tuple:
        return {_TUPLE: [marked(v) for v in value]}
    if kind is dict:
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: marked(v) for k, v in value.items()}
        return {_MAP: [[marked(k), marked(v)] for k, v in value.items()]}
    raise TypeError(f"a {kind.__name__} is no plain data and cannot be marked")


def unmarked(value: Any) -> Any:
    """What `marked` was given. Data without marks stays as it is.

    Example: unmarked({"$tuple": [1, 2]}) == (1, 2), unmarked({"a": [1]}) == {"a": [1]}.
    """
    if isinstance(value, list):
        return [unmarked(v) for v in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    found = cast(dict[str, Any], value)
    if len(found) == 1:
        ((mark, inside),) = found.items()
        if mark == _TUPLE:
            return tuple(unmarked(v) for v in inside)
        if mark == _MAP:
            return {unmarked(k): unmarked(v) for k, v in inside}
        if mark == _INT:
            return int(inside)
    return {k: unmarked(v) for k, v in found.items()}


def _small(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} of a map is no string")
    return key
