"""Which groups can be trained: a guard on tags, produced fields and row lengths.

A group trains whole or not at all, because advantages compare its members. Selected groups are
expected to pass: one that does not is reported, and costs the step nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dataplane.fields import LOST
from trainer.select.groups import Group, Row
from trainer.trajectory import COMPLETED, Trajectory


@dataclass(frozen=True, slots=True)
class Skipped:
    """A group that is left out, and why."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What a step trains."""

    groups: list[list[Trajectory]]
    """# [groups][members], in the order given"""
    skipped: list[Skipped]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, group after group: the rows of the plan."""
        return [row for group in self.groups for row in group]

    @property
    def keys(self) -> list[str]:
        """Their keys, in the same order."""
        return [row.key for row in self.trajectories]


def select_valid(
    groups: Iterable[Group], *, required: Collection[str] = (), step: int | None = None
) -> Selection:
    """The groups whose members all fit together; before anything is dispatched.

    A group is skipped if it has no trajectory, if one is not completed or is lost, or if one has no
    `input_ids` of at least two tokens, `labels` of another length, `logprobs` of another length,
    or `routed_experts` of another length less one. A response that supervises nothing is no fault:
    it trains with no weight. Where lengths are not known, the tags alone decide.

    Args:
        required: fields that the run cannot do without (`routed_experts` where routing is
            replayed, `logprobs` where importance is corrected).

    Raises:
        ValueError: a trajectory lacks a tag of `write_train_meta` (names key and tag) or a
            required field (names key and field), or no group is left.
    """
    kept: list[list[Trajectory]] = []
    skipped: list[Skipped] = []
    for group in groups:
        reason = _fault(group)
        if reason is None:
            members = [row.trajectory() for row in group.rows]
            reason = _contradiction(group, members)
            if reason is None:
                _require(group, members, required)
                kept.append(members)
        if reason is not None:
            skipped.append(Skipped(group.uid, reason))
    if not kept:
        name = "the batch" if step is None else f"step {step}"
        why = "; ".join(f"{skip.uid}: {skip.reason}" for skip in skipped[:5])
        raise ValueError(f"{name} has no valid training samples" + (f" ({why})" if why else ""))
    return Selection(kept, skipped)


def _fault(group: Group) -> str | None:
    if not group.rows:
        return "it has no trajectory"
    for row in group.rows:
        if row.is_lost:
            return f"{row.key} has lost {row.tags[LOST]}"
        if row.tags.get("status") != COMPLETED:
            return f"{row.key} is {row.tags.get('status')}"
        fault = _misfit(row)
        if fault is not None:
            return f"{row.key}: {fault}"
    return None


def _misfit(row: Row) -> str | None:
    for name in ("input_ids", "labels"):
        if row.has(name) is False:
            return f"it has no {name}"
    if row.lengths is None:
        return None
    tokens = row.lengths.get("input_ids", -1)
    for name, due in (("labels", tokens), ("logprobs", tokens), ("routed_experts", tokens - 1)):
        size = row.lengths.get(name, -1)
        if tokens >= 0 and size >= 0 and size != due:
            return f"{name} has {size} entries for {tokens} tokens, not {due}"
    return None


def _contradiction(group: Group, members: list[Trajectory]) -> str | None:
    for row, member in zip(group.rows, members, strict=True):
        tokens = -1 if row.lengths is None else row.lengths.get("input_ids", -1)
        if tokens >= 0 and tokens != member.seq_len:
            return f"{row.key}: its tag seq_len is {member.seq_len}, and it has {tokens} tokens"
        if member.seq_len <= 1:
            return f"{row.key}: {member.seq_len} tokens, of which none could be input and label"
    return None


def _require(group: Group, members: list[Trajectory], required: Collection[str]) -> None:
    for row, member in zip(group.rows, members, strict=True):
        for name in required:
            flags = {
                "logprobs": member.has_rollout_logprobs,
                "routed_experts": member.has_routed_experts,
            }
            has = row.has(name)
            if not (flags.get(name, False) if has is None else has):
                raise ValueError(f"key {row.key!r} has no field {name!r}, which this run requires")
