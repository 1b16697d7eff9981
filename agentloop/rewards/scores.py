"""What a judge may say of one trajectory: a map with a finite `score`. Pure checks.

A reward that did not pass here is never published: no score is better than a wrong one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, cast

from agentloop.rewards.types import RewardError


def verdict(said: object) -> dict[str, Any]:
    """The map of one trajectory's reward: `score` as a float, and what else was said.

    Example: verdict(True) == {"score": 1.0}, verdict({"score": 2, "why": "x"}) ==
    {"score": 2.0, "why": "x"}.

    Raises:
        RewardError: there is no score, or it is not a finite number.
    """
    if not isinstance(said, Mapping):
        return {"score": finite(said)}
    parts = cast(Mapping[object, Any], said)
    if "score" not in parts:
        raise RewardError(f"a reward needs a 'score'; got the names {_some(parts)}")
    odd = [name for name in parts if not isinstance(name, str)]
    if odd:
        raise RewardError(f"the names in a reward are strings; got {_some(odd)}")
    return {**cast(Mapping[str, Any], parts), "score": finite(parts["score"])}


def verdicts(said: object, count: int) -> list[dict[str, Any]]:
    """The rewards of `count` trajectories, in order.

    Raises:
        RewardError: it is no list, has another length, or one of it is no reward; the message
            says which.
    """
    listed = getattr(said, "tolist", None)
    values: object = listed() if callable(listed) else said
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RewardError(f"a list of {count} rewards was due; got {type(said).__name__}")
    each = list(cast(Iterable[object], values))
    if len(each) != count:
        raise RewardError(f"{count} rewards were due, one for each trajectory; got {len(each)}")
    judged: list[dict[str, Any]] = []
    for position, value in enumerate(each):
        try:
            judged.append(verdict(value))
        except RewardError as error:
            raise RewardError(f"reward {position} of {count}: {error}") from error
    return judged


def score_of(reward: Mapping[str, Any] | None) -> float | None:
    """The score that may be published and counted, or None if there is none.

    Example: score_of(None) is None, score_of({"score": float("nan")}) is None.
    """
    if reward is None:
        return None
    try:
        return verdict(reward)["score"]
    except RewardError:
        return None


def finite(value: object) -> float:
    """The number as a float; scalars of numpy and torch count as numbers, text does not.

    Raises:
        RewardError: it is no number, or not a finite one.
    """
    number = _as_float(value)
    if number is None:
        raise RewardError(f"a score is a number; got {type(value).__name__}")
    if not math.isfinite(number):
        raise RewardError(f"a score is a finite number; got {number}")
    return number


def _as_float(value: object) -> float | None:
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(operator.index(cast(Any, value)))
    except OverflowError:
        return math.inf
    except Exception:
        pass
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(cast(SupportsFloat, value))
    except Exception:
        return None


def _some(names: Iterable[object]) -> str:
    shown = [repr(name)[:40] for name in names]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "") if shown else "(none)"
