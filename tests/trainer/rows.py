"""Trajectories and rows for tests, with only what a test is about spelled out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataplane.fields import LOST, LOST_AT, LOST_STORES
from trainer.select import Row
from trainer.trajectory import Trajectory


def tags(
    uid: str = "u",
    session: int | str = 0,
    index: int = 0,
    *,
    prompt: int = 3,
    response: int = 3,
    **more: Any,
) -> dict[str, Any]:
    """The tags of a completed trajectory."""
    return {
        "uid": uid,
        "session_id": session,
        "index": index,
        "status": "completed",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "policy_len": response if prompt else max(response - 1, 0),
        "score": 0.0,
        **more,
    }  # fmt: skip


def trajectory(uid: str = "u", session: int | str = 0, index: int = 0, **more: Any) -> Trajectory:
    """One trajectory; the key is made of the identity, as producers make it."""
    return Trajectory.of(f"{uid}_{session}_{index}", tags(uid, session, index, **more))


def scored(*scores: float | None, uid: str = "u", **more: Any) -> list[Trajectory]:
    """A group of one session a score."""
    return [trajectory(uid, i, score=score, **more) for i, score in enumerate(scores)]


def row(
    uid: str = "u",
    session: int | str = 0,
    index: int = 0,
    *,
    sizes: dict[str, int] | None = None,
    fields: tuple[str, ...] | None = None,
    **more: Any,
) -> Row:
    """One row of a listing, with the lengths that its tags promise."""
    its = tags(uid, session, index, **more)
    tokens = its["seq_len"]
    lengths = {"input_ids": tokens, "labels": tokens, "logprobs": tokens, "routed_experts": -1}
    lengths |= sizes or {}
    names = fields or tuple(name for name, size in lengths.items() if size >= 0)
    return Row(f"{uid}_{session}_{index}", its, names, lengths)


def lost(uid: str = "u", session: int = 0, **more: Any) -> Row:
    """A trajectory whose fields are gone with their value store."""
    its = {LOST: ["input_ids", "labels"], LOST_STORES: ["s1"], LOST_AT: 5.0}
    return replace(row(uid, session, **its, **more), fields=(), lengths={})


def failed(uid: str = "u", session: int = 0, status: str = "failed") -> Row:
    """What a session that came to nothing leaves: tags, and no field."""
    its = {"uid": uid, "session_id": session, "index": 0, "status": status, "error_msg": "boom"}
    return Row(f"{uid}_{session}_0", its, (), {})


def prompt(
    uid: str = "u", status: str = "finished", step: int | None = 1, n: int = 2, **more: Any
) -> Row:
    """The row of a prompt."""
    its = {"uid": uid, "is_prompt": True, "status": status, "global_steps": step, "n": n, **more}
    return Row(uid, its, (), {})
