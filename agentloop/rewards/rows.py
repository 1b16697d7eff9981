"""What judges read from a dataset's row: a column by its path, and JSON of what is sent away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentloop.rewards.types import RewardError

TRUTH_COLUMNS: Final = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
"""Where datasets keep what is right; the first that a row has."""


def column(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path like `reward_model.ground_truth`, or None."""
    found: Any = row
    for name in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = cast(Mapping[str, Any], found).get(name)
    return found


def truth(row: Mapping[str, Any], paths: Sequence[str]) -> str:
    """The right answer of a row, as text.

    Raises:
        RewardError: the row has it in none of these columns.
    """
    for path in paths:
        found = column(row, path)
        if isinstance(found, list | tuple) and len(cast(Sequence[Any], found)) == 1:
            found = cast(Sequence[Any], found)[0]
        if isinstance(found, bool) or found is None:
            continue
        if isinstance(found, str | int | float):
            return str(found)
    raise RewardError(
        f"the row has no right answer: none of {', '.join(paths)} is there; it has "
        f"{', '.join(map(str, row)) or 'no columns'}"
    )


def to_json(value: Any, what: str) -> bytes:
    """JSON text in UTF-8; numpy's numbers and arrays become numbers and lists.

    Raises:
        RewardError: something in it has no JSON form, such as bytes, NaN or an object.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_simple).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"{what} has no JSON form: {error}") from error


def _simple(value: Any) -> Any:
    listed = getattr(value, "tolist", None)
    if callable(listed):
        return listed()
    raise TypeError(f"a {type(value).__name__} is none of JSON's types")
