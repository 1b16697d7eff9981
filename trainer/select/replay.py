"""Which groups go, which are replaced and which are trained: one decision for one snapshot.

The rules are those of verl's V1 replay buffer, with sessions counted where it counts rows, and
with a way out where it waits for ever. `k` is the number of groups evicted:

    mode    stale              identical rewards       failed
    sync    -                  evict k, credit 2 k     kept; or evict and refill k
    async   evict, refill k    evict, refill k         evict, refill k
    val     -                  -                       kept

Groups that lost trajectories with a value store are evicted and refilled in sync and async, unless
nothing can be submitted in their place. A group that goes for several reasons goes once. Clearing,
submitting and waiting are the caller's, who carries the `state` from one decision to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.errors import PlanError
from trainer.select.eviction import Eviction, credit, evictions, shrinks
from trainer.select.groups import FAILURE, FINISHED, IN_FLIGHT, Group
from trainer.select.policy import ReplayPolicy
from trainer.select.staleness import span


@dataclass(frozen=True, slots=True)
class ReplayState:
    """What the decisions for one batch remember of each other."""

    credit: int = 0
    """Prompts that may still be submitted in place of evicted ones."""
    dropped: int = 0
    """Groups by which the batch shrank."""
    rounds: int = 0
    """How often prompts were replaced."""
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now: clear `clear_keys`, submit `refill` prompts, train `selected`."""

    state: ReplayState
    """Goes into the next decision."""
    evicted: tuple[Eviction, ...] = ()
    refill: int = 0
    selected: tuple[Group, ...] = ()
    """The batch, oldest prompts first; empty as long as there is none."""
    surplus: tuple[Group, ...] = ()
    """Groups that were finished and are too many: sync keeps no backlog."""
    poll_again: bool = False
    """Look again at once: the snapshot is out of date by this very decision."""
    starved: bool = False
    """Nothing is in flight, nothing is submitted, and the batch is not full: waiting is in vain."""
    reason: str = ""
    """Why there is no batch yet."""

    @property
    def clear_keys(self) -> list[str]:
        """Every key of the groups that go, prompts included: one clear."""
        gone = (*(eviction.group for eviction in self.evicted), *self.surplus)
        return [key for group in gone for key in group.all_keys]


def decide(
    groups: Sequence[Group],
    policy: ReplayPolicy,
    *,
    step: int,
    batch_size: int,
    state: ReplayState | None = None,
    replaces_lost: bool = True,
) -> Decision:
    """What to do about one snapshot, for a batch of so many groups.

    Only finished and failed groups are looked into; trajectories of the others may be listed
    already. Groups without a prompt row were selected earlier and are left alone. Where nothing can
    be submitted in place of groups that are lost, `replaces_lost` is False.

    Raises:
        PlanError: a group is incomplete where that is strict, the refill bound is passed, the
            batch has shrunk to nothing, or a selected group has no trajectory.
    """
    if batch_size < 1:
        raise ValueError(f"a batch is 1 group or more, not {batch_size}")
    state = state or ReplayState()
    terminal = [group for group in groups if group.status in (FINISHED, FAILURE)]
    flying = [group for group in groups if group.status in IN_FLIGHT]
    evicted = evictions(terminal, policy, step, replaces_lost=replaces_lost)
    gone = {id(eviction.group) for eviction in evicted}
    sampleable = [group for group in terminal if id(group) not in gone]
    state = replace(
        state,
        evicted=state.evicted + len(evicted),
        dropped=state.dropped + sum(shrinks(e, policy) for e in evicted),
        credit=state.credit + sum(credit(e, policy) for e in evicted),
    )
    target = batch_size - state.dropped
    if target < 1:
        raise PlanError(f"all {batch_size} groups of the batch were incomplete and dropped")
    full = len(sampleable) >= target
    draft = Decision(state, tuple(evicted))
    if policy.mode == "async":
        if evicted:
            draft = _refilled(draft, state.credit)
        elif _blocked(flying, policy, step):
            return replace(draft, reason=_blocked(flying, policy, step))
        elif full:
            return _selected(draft, sampleable, target, policy, step)
    elif policy.drop_identical:
        if full:
            draft = replace(draft, state=replace(state, credit=0))
            if not flying:
                return _selected(draft, sampleable, target, policy, step, keep_rest=False)
            return replace(draft, reason=f"{len(flying)} prompts in flight are to end first")
        prompts = _dispatch(state.credit, len(flying), policy, batch_size)
        draft = _refilled(draft, prompts)
    elif full:
        return _selected(draft, sampleable, target, policy, step)
    else:
        draft = _refilled(draft, state.credit)
    _bound(draft, policy, len(sampleable), target)
    return replace(
        draft,
        poll_again=bool(draft.refill or draft.evicted),
        starved=not (flying or draft.refill or draft.evicted),
        reason=f"{len(sampleable)} of {target} groups are there, {len(flying)} in flight",
    )


def sampleable_count(
    groups: Sequence[Group], policy: ReplayPolicy, *, step: int, replaces_lost: bool = True
) -> int:
    """How many groups could be trained now."""
    terminal = [group for group in groups if group.status in (FINISHED, FAILURE)]
    return len(terminal) - len(evictions(terminal, policy, step, replaces_lost=replaces_lost))


def _blocked(flying: Sequence[Group], policy: ReplayPolicy, step: int) -> str:
    if policy.max_span is None or policy.on_stale != "wait":
        return ""
    old = [
        group.uid
        for group in flying
        if group.global_steps is not None and span(group.global_steps, step) >= policy.max_span
    ]
    return (
        f"{len(old)} prompts in flight are as old as allowed: {', '.join(old[:5])}" if old else ""
    )


def _dispatch(owed: int, in_flight: int, policy: ReplayPolicy, batch_size: int) -> int:
    """Whole generation batches within credit and room.

    With nothing in flight, one batch beyond the credit: less would wait for ever.
    """
    size = policy.gen_batch_size
    slots = policy.free_slots(batch_size, in_flight)
    prompts = min(owed, slots) // size * size
    return size if not prompts and owed and not in_flight and size <= slots else prompts


def _refilled(draft: Decision, prompts: int) -> Decision:
    state = draft.state
    left = max(state.credit - prompts, 0)
    rounds = state.rounds + (prompts > 0)
    return replace(draft, refill=prompts, state=replace(state, credit=left, rounds=rounds))


def _bound(draft: Decision, policy: ReplayPolicy, sampleable: int, target: int) -> None:
    limit = policy.max_refill_rounds
    if limit is not None and draft.state.rounds > limit:
        raise PlanError(
            f"prompts were replaced {limit} times and {sampleable} of {target} groups are there; "
            f"{draft.state.evicted} groups were evicted (max_refill_rounds {limit})"
        )


def _selected(
    draft: Decision,
    sampleable: Sequence[Group],
    target: int,
    policy: ReplayPolicy,
    step: int,
    *,
    keep_rest: bool = True,
) -> Decision:
    oldest = sorted(
        sampleable, key=lambda g: float("inf") if g.global_steps is None else g.global_steps
    )
    chosen = tuple(oldest[:target])
    if policy.mode != "val":
        empty = [group.uid for group in chosen if not group.completed]
        if empty:
            raise PlanError(
                f"groups without a single trajectory would be trained: {', '.join(empty[:5])}; "
                f"set failed='refill_empty' to have them replaced"
            )
    if policy.on_stale == "drop":
        ages = [span(g.global_steps, step) for g in chosen if g.global_steps is not None]
        assert policy.max_span is None or all(age <= policy.max_span for age in ages)
    rest = () if keep_rest else tuple(oldest[target:])
    return replace(draft, state=ReplayState(), selected=chosen, surplus=rest)
