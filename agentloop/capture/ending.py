"""A run that has ended, as canonical trajectories: one for each branch. Pure.

Owns which tokens are supervised: those that the model made, each once in a run. A turn that several
branches share is supervised in the first of them, so a run trains on every token as often as it was
generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentloop.capture.tree import Branch, Tree
from agentloop.capture.turn import RefusedTurn, Turn
from agentloop.trajectory.canonicalize import canonicalize, drop_failed
from agentloop.trajectory.state import RolloutState, Status, status_of
from agentloop.trajectory.trace import Piece, fill_from_trace

FINISHES: Final = ("stop", "length", "tool_calls", "abort", "error")
"""What an agent may say of how its run ended."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose run it is."""

    run_id: str
    uid: str
    session_id: int
    attempt: int | None = None
    """The begin of its group, if it belongs to one."""
    global_steps: int | None = None
    """The trainer's step when it began."""
    task_name: str = ""
    data_source: str | None = None
    tags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further tags of its trajectories."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a run at its end."""

    reward: Mapping[str, Any] | None = None
    """With `score`."""
    finish_reason: str | None = None
    """Of all of it; None leaves each branch the reason of its last turn."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None
    """Why it failed, if it did."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """What of a run may not be trained on, for people to look at."""

    name: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run comes to."""

    states: list[RolloutState]
    """To be published: never none. Failed ones only where there are no others."""
    rejected: list[Rejected]


def ended(
    identity: Identity, tree: Tree, refused: Sequence[RefusedTurn], verdict: Verdict
) -> Ended:
    """The trajectories of a run, and what of it was rejected.

    Example: two turns of which the second goes on from the first are one trajectory with index 0,
    whose labels are the tokens of both completions and -100 elsewhere.
    """
    states = [
        _trajectory(identity, index, tree, branch, verdict)
        for index, branch in enumerate(tree.branches())
    ]
    rejected = [
        Rejected(f"branch-{state.index}", state.error_msg or "", state.extra["capture"])
        for state in states
        if state.status is Status.FAILED and verdict.finish_reason != "error"
    ]
    for turn in refused:
        state = _bare(identity, len(states), verdict)
        state.messages = list(turn.messages)
        state.fail(turn.reason, "ingest")
        states.append(state)
        evidence = {"number": turn.number, "reply": turn.evidence}
        rejected.append(Rejected(f"turn-{turn.number}", turn.reason, evidence))
    if not states:
        state = _bare(identity, 0, verdict)
        _settle(state, verdict, None)
        if state.status is Status.COMPLETED:
            state.fail("the agent asked the model nothing", "empty")
        states.append(state)
    return Ended(drop_failed(states), rejected)


def _bare(identity: Identity, index: int, verdict: Verdict) -> RolloutState:
    return RolloutState(
        messages=[],
        uid=identity.uid,
        session_id=identity.session_id,
        index=index,
        task_name=identity.task_name,
        data_source=identity.data_source,
        reward=None if verdict.reward is None else dict(verdict.reward),
        extra={**verdict.extra, "capture": {"run_id": identity.run_id}},
    )


def _trajectory(
    identity: Identity, index: int, tree: Tree, branch: Branch, verdict: Verdict
) -> RolloutState:
    first, last = branch.path[0], branch.path[-1]
    state = _bare(identity, index, verdict)
    dialogue = tree.dialogue(last.number)
    state.messages = [dict(message) for message in first.messages[:-1]]
    state.conversation = [dict(message) for message in dialogue]
    answer = dialogue[-1].get("content")
    state.response = answer if isinstance(answer, str) else ""
    state.prompt_ids = first.between.tolist()
    state.num_turns = len(branch.path)
    kinds = {turn.logprob_kind for turn in branch.path[branch.shared :]}
    state.logprob_kind = kinds.pop() if len(kinds) == 1 else None
    state.extra["capture"] |= {
        "turns": [_told(turn) for turn in branch.path],
        "shared_turns": branch.shared,
        "differs_at": branch.differs_at,
        "differs_from": branch.differs_from,
    }
    made = any(len(turn.completion) for turn in branch.path[branch.shared :])
    if made:
        fill_from_trace(state, _pieces(branch), trims=True)
    _settle(state, verdict, last.finish_reason)
    if state.status is Status.COMPLETED and not made:
        state.fail("the policy generated nothing", "empty")
    canonicalize(state, builds=False, multimodal=False)
    return state


def _pieces(branch: Branch) -> list[Piece]:
    pieces: list[Piece] = []
    for position, turn in enumerate(branch.path):
        if len(turn.between):
            pieces.append(Piece(turn.between.tolist()))
        ids: list[int] = turn.completion.tolist()
        if ids and position < branch.shared:
            pieces.append(Piece(ids, versions=turn.versions))
        elif ids:
            pieces.append(Piece(ids, ids, turn.logprobs.tolist(), turn.versions))
    return pieces


def _settle(state: RolloutState, verdict: Verdict, finish_reason: str | None) -> None:
    """The status that follows from how it ended."""
    state.finish_reason = verdict.finish_reason or finish_reason or "stop"
    state.status = status_of(state.finish_reason)
    if state.status is Status.FAILED:
        state.fail(verdict.error or "the agent says that it failed", "agent")
        state.reward = None
    elif state.status is Status.ABORTED:
        state.error_msg = verdict.error
        state.reward = None


def _told(turn: Turn) -> dict[str, Any]:
    return {
        "number": turn.number,
        "prompt_tokens": len(turn.between),
        "completion_tokens": len(turn.completion),
        "finish_reason": turn.finish_reason,
        "sampling": dict(turn.sampling),
        **turn.extra,
    }
