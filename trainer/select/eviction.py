"""Which groups go, and why: too old, all sessions alike, failed, lost, or short of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainer.errors import PlanError
from trainer.select.groups import FAILURE, FINISHED, Group
from trainer.select.policy import ReplayPolicy
from trainer.select.staleness import span

Reason: TypeAlias = Literal["stale", "identical", "failure", "lost", "incomplete"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A group that goes, and every reason why."""

    group: Group
    reasons: frozenset[Reason]
    span: int | None = None
    """How old it is, if that is why."""
    outcome: float | None = None
    """What all of its sessions have in common, if that is why."""


def evictions(
    terminal: Sequence[Group], policy: ReplayPolicy, step: int, *, replaces_lost: bool = True
) -> list[Eviction]:
    """The finished and failed groups that go, each once.

    Args:
        replaces_lost: those that lost trajectories go, to be replaced like failed ones. If not, a
            lost session is one that they have not got.

    Raises:
        PlanError: a group ended incomplete and that is strict; names all of them.
        ValueError: a session to filter by has no outcome.
    """
    if policy.mode == "val":
        return []
    found: list[Eviction] = []
    short: list[str] = []
    for group in terminal:
        reasons: set[Reason] = set()
        age = None if group.global_steps is None else span(group.global_steps, step)
        outcome = _common_outcome(group, policy) if policy.drop_identical else None
        if _is_failure(group, policy):
            reasons.add("failure")
        if replaces_lost and group.is_lost:
            reasons.add("lost")
        if group.status == FINISHED and _is_stale(age, policy):
            reasons.add("stale")
        if outcome is not None:
            reasons.add("identical")
        if group.n is not None and policy.incomplete != "keep" and not reasons:
            sessions = sum(not row.is_lost for row in group.sessions().values())
            if sessions < group.n:
                reasons.add("incomplete")
                short.append(f"{group.uid} {sessions} of {group.n}")
        if reasons:
            found.append(
                Eviction(group, frozenset(reasons), age if "stale" in reasons else None, outcome)
            )
    if short and policy.incomplete == "strict":
        raise PlanError(f"groups ended with fewer sessions than they began: {', '.join(short)}")
    return found


def _is_failure(group: Group, policy: ReplayPolicy) -> bool:
    if policy.mode == "async" or policy.failed == "refill":
        return group.status == FAILURE or not group.completed
    return policy.failed == "refill_empty" and not group.completed


def _is_stale(age: int | None, policy: ReplayPolicy) -> bool:
    """A group whose age is not known counts as fresh."""
    if age is None or policy.max_span is None or policy.on_stale != "drop":
        return False
    return age > policy.max_span


def _common_outcome(group: Group, policy: ReplayPolicy) -> float | None:
    """What all sessions of a finished group had as outcome; None if they differ, or are one."""
    if group.status != FINISHED:
        return None
    outcomes: list[float] = []
    for row in group.sessions().values():
        outcome = row.tags.get(policy.outcome_tag)
        if isinstance(outcome, bool) or not isinstance(outcome, (int, float)):
            raise ValueError(
                f"key {row.key!r} has no number as tag {policy.outcome_tag!r} to filter groups by"
            )
        outcomes.append(float(outcome))
    return outcomes[0] if len(outcomes) > 1 and max(outcomes) == min(outcomes) else None


def shrinks(eviction: Eviction, policy: ReplayPolicy) -> bool:
    """Whether the batch gets smaller by it, because nothing is submitted in its place."""
    return policy.incomplete == "drop" and "incomplete" in eviction.reasons


def credit(eviction: Eviction, policy: ReplayPolicy) -> int:
    """Prompts to submit in its place: two where half of them may turn out to teach nothing too."""
    if shrinks(eviction, policy):
        return 0
    return 2 if policy.mode == "sync" and "identical" in eviction.reasons else 1
