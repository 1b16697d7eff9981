"""Advantages of a whole batch: cluster each group, estimate, give every member its session's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from trainer.advantage.config import BY_BATCH, AdvantageConfig
from trainer.advantage.estimators import ESTIMATORS, Floats, whitened
from trainer.advantage.sessions import Sessions, cluster
from trainer.errors import PlanError
from trainer.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Advantages:
    """One number a trajectory, to be spread over the tokens that it supervises."""

    values: list[float]  # [rows] groups one after the other
    session_scores: list[float]
    """The score of every session of the batch, each once. # [sessions]"""


def advantages(groups: Sequence[Sequence[Trajectory]], config: AdvantageConfig) -> Advantages:
    """The advantages of these groups, in their order.

    All rows of a session get the same one. Filler rows, and rows without a score where none is
    needed, get 0. With no estimator or a weight of 0 all are 0 and none is called.

    Example: sessions a, a, b of scores 1, 1, 0 are two sessions: 0.7071068 twice and -0.7071068.

    Raises:
        ValueError: a score is missing or not finite; names the key.
        PlanError: the estimator works per token (`gae`: workers call it), or cannot work with
            groups of this size.
    """
    if config.by_token:
        raise PlanError(
            f"estimator {config.estimator!r} differs by token: workers compute it from 'values'"
        )
    clusters = [
        cluster(group, scored=config.task_adv_weight > 0, representative=config.session)
        for group in groups
    ]
    scores = [score for sessions in clusters for score in sessions.scores]
    if not config.estimates:
        return Advantages([0.0 for group in groups for _ in group], scores)
    if config.estimator in BY_BATCH:
        return Advantages(_by_batch(groups, clusters, config), scores)
    values: list[float] = []
    for sessions in clusters:
        values += _scattered(sessions, _of_group(sessions, config))
    return Advantages(values, scores)


def _of_group(sessions: Sessions, config: AdvantageConfig) -> list[float]:
    if not sessions.scores:
        return []
    sizes = [
        row.response_len if config.lengths == "response" else row.policy_len
        for row in sessions.representatives
    ]
    estimator = ESTIMATORS[cast("str", config.estimator)]
    values = estimator(_floats(sessions.scores), _floats(sizes), config)
    if config.session == "last":
        silent = [row.policy_len == 0 for row in sessions.representatives]
        values = np.where(silent, 0.0, values)
    return values.tolist()


def _by_batch(
    groups: Sequence[Sequence[Trajectory]], clusters: Sequence[Sessions], config: AdvantageConfig
) -> list[float]:
    returns: list[float] = []
    for sessions in clusters:
        scores = _floats(sessions.scores)
        if config.estimator == "reinforce_plus_plus_baseline" and len(scores):
            scores = np.where(scores.max() == scores.min(), 0.0, scores - scores.mean())
        returns += _scattered(sessions, scores.tolist())
    members = [
        (member, session is not None)
        for group, sessions in zip(groups, clusters, strict=True)
        for member, session in zip(group, sessions.of_member, strict=True)
    ]
    weights = _floats([member.policy_len if counts else 0 for member, counts in members])
    if not weights.any():
        return [0.0] * len(members)
    whole = whitened(_floats(returns), weights, config)
    return np.where(weights > 0, whole, 0.0).tolist()


def _scattered(sessions: Sessions, values: Sequence[float]) -> list[float]:
    return [0.0 if at is None else values[at] for at in sessions.of_member]


def _floats(values: Sequence[float]) -> Floats:
    return np.asarray(values, np.float64)
