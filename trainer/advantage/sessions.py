"""Trajectories of one session, counted once: they share one reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of one group, and who belongs to which."""

    scores: list[float]  # [sessions]
    representatives: list[Trajectory]  # [sessions]
    of_member: list[int | None]  # [members] which session; None of a row without a score


def cluster(
    members: Sequence[Trajectory],
    *,
    scored: bool = True,
    representative: Literal["first", "last"] = "first",
) -> Sessions:
    """The sessions of a group, in the order in which each first appears.

    The score of a session is that of its representative, whatever its other rows say. Filler rows
    are in none.

    Args:
        scored: whether every row needs a score.
        representative: the first row of a session, or the one of highest index (verl's rule, where
            earlier ones are prefixes of it).

    Raises:
        ValueError: a score is missing and needed, or is not finite; names the key.
    """
    place: dict[int | str, int] = {}
    sessions = Sessions([], [], [])
    for member in members:
        if member.is_padding:
            sessions.of_member.append(None)
            continue
        score = _score(member, scored)
        if score is None:
            sessions.of_member.append(None)
            continue
        at = place.setdefault(member.session_id, len(place))
        sessions.of_member.append(at)
        if at == len(sessions.scores):
            sessions.scores.append(score)
            sessions.representatives.append(member)
        elif representative == "last" and member.index >= sessions.representatives[at].index:
            sessions.scores[at] = score
            sessions.representatives[at] = member
    return sessions


def _score(member: Trajectory, needed: bool) -> float | None:
    if member.score is None:
        if needed:
            raise ValueError(
                f"key {member.key!r}: its score is missing, and a task_adv_weight above 0 needs one"
            )
        return None
    if not math.isfinite(member.score):
        raise ValueError(f"key {member.key!r}: its score is {member.score}")
    return member.score
