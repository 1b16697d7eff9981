"""One session from its prompt to what is published: run, judged, made canonical.

Owns the order of these steps and the rule that a session fails alone: whatever its loop, its judge
or its tokens do, the answer is a list of trajectories that say so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from agentloop.engines.types import EngineError
from agentloop.loops.loop import AgentLoop, Session, SessionAborted, leave_behind
from agentloop.rewards.judging import ask
from agentloop.rewards.types import Reward, RewardError
from agentloop.trajectory.canonicalize import canonicalize_group, drop_failed
from agentloop.trajectory.state import RolloutState, Status, status_of

_log = logging.getLogger(__name__)

JUDGE_GRACE_S: Final = 10.0
"""How long a judge may go on when the session is asked to stop."""

STOP_S: Final = 2.0
"""How long a loop that was cancelled may take to end before nobody waits for it."""

_LONG_S: Final = 86400.0

_Result = TypeVar("_Result")


async def run_session(
    loop: AgentLoop,
    state: RolloutState,
    session: Session,
    reward: Reward | None,
    *,
    timeout_s: float | None,
    judge_grace_s: float = JUDGE_GRACE_S,
) -> list[RolloutState]:
    """The trajectories of one session, each with its final status; never none.

    Completed ones are judged, once for the session, share that reward, and are canonical. Failed
    ones are left out as long as there are others; an evaluation keeps them as completed with score
    0. What was completed before is not run again, and with a score not judged again.

    A session that is asked to stop is aborted with what it has, also if its loop took no notice
    and went on to the end; only one that is being judged by then may still complete. `timeout_s`
    bounds the loop and the judge together.

    Raises nothing but the cancellation of its caller.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    if state.status is Status.COMPLETED:
        states = [state]
    else:
        states = await _generated(loop, state, session, deadline)
    await _judge(states, session, reward, deadline, judge_grace_s)
    for failed in _canonical(states, session):
        _log.error("session %s: %s", failed.key, failed.error_msg)
    if session.evaluates:
        _count_as_zero(states, session)
        return states
    return drop_failed(states)


# -- run -------------------------------------------------------------------------------------


async def _generated(
    loop: AgentLoop, state: RolloutState, session: Session, deadline: float
) -> list[RolloutState]:
    """What the loop made, with the statuses that follow from how it ended."""
    if session.abort_requested.is_set():
        return _aborted([state])
    state.status = Status.INIT
    state.error_msg = state.failure = None
    try:
        result = await _bounded(loop.run(state, session), deadline)
        states = _trajectories(result, state)
    except SessionAborted:
        return _aborted([state])
    except _Overdue:
        # A loop that does not let itself be cancelled still has the state: leave it that one.
        return [_failed(replace(state), "the session took longer than its time", "timeout")]
    except Exception as error:
        kind = "engine" if isinstance(error, EngineError) else getattr(error, "failure", "loop")
        _log.warning("session %s failed", state.key, exc_info=error)
        return [_failed(state, f"{type(error).__name__}: {error}", kind)]
    for trajectory in states:
        _settle(trajectory)
    if session.abort_requested.is_set() or any(t.status is Status.ABORTED for t in states):
        return _aborted(states)
    return states


def _trajectories(result: object, state: RolloutState) -> list[RolloutState]:
    """A loop's result as trajectories of this session.

    Raises:
        TypeError, ValueError: it is none.
    """
    states: list[Any] = [result]
    if isinstance(result, Sequence):
        states = list(cast("Sequence[Any]", result))
    if not states:
        raise ValueError("the loop returned no trajectory")
    for trajectory in states:
        if not isinstance(trajectory, RolloutState):
            raise TypeError(f"the loop returned a {type(trajectory).__name__}, no RolloutState")
    if len({id(trajectory) for trajectory in states}) < len(states):
        raise ValueError("the loop returned the same trajectory twice")
    for index, trajectory in enumerate(cast("list[RolloutState]", states)):
        trajectory.uid = state.uid
        trajectory.session_id = state.session_id
        trajectory.index = index
        trajectory.task_name = state.task_name
        trajectory.data_source = trajectory.data_source or state.data_source
    return states


def _settle(state: RolloutState) -> None:
    """The status that follows from how a trajectory ended."""
    if state.status is Status.FAILED:
        state.finish_reason = "error"
    if state.status not in (Status.INIT, Status.COMPLETED):
        return  # its loop says so
    state.status = status_of(state.finish_reason)
    if state.status is Status.FAILED:
        state.fail(f"it ended with finish reason {state.finish_reason!r}", "engine")
    elif state.status is Status.COMPLETED and not (
        state.response_ids or state.canonical or (state.response_ids is None and state.response)
    ):
        state.fail("the policy generated nothing", "empty")


def _aborted(states: list[RolloutState]) -> list[RolloutState]:
    """They end with what they have, and may go on; what has failed stays so."""
    for state in states:
        if state.status is not Status.FAILED:
            state.leave_completed(Status.ABORTED)
            state.finish_reason = "abort"
            state.reward = None
    return states


def _failed(state: RolloutState, reason: str, kind: str) -> RolloutState:
    state.reset()
    state.finish_reason = "timeout" if kind == "timeout" else "error"
    state.fail(reason, kind)
    return state


# -- judge -----------------------------------------------------------------------------------


async def _judge(
    states: list[RolloutState],
    session: Session,
    reward: Reward | None,
    deadline: float,
    grace_s: float,
) -> None:
    """The completed trajectories of a session have its reward: that of the last one."""
    completed = [state for state in states if state.status is Status.COMPLETED]
    if not completed:
        return
    found = next((s.reward for s in reversed(completed) if _has_score(s)), None)
    if found is None:
        if reward is None:
            return
        try:
            work = _verdict(reward, completed[-1], deadline)
            found = await _bounded(session.unless_aborted(work, grace_s=grace_s), deadline)
        except SessionAborted:
            _aborted(states)
            return
        except _Overdue:
            for state in completed:
                state.fail("the judge took longer than the session's time", "timeout")
            return
        except Exception as error:
            kind = "" if isinstance(error, RewardError) else f"{type(error).__name__}: "
            for state in completed:
                state.fail(f"judging failed: {kind}{error}", "reward")
            return
    for state in completed:
        if not _has_score(state):
            state.reward = dict(found)


async def _verdict(reward: Reward, state: RolloutState, deadline: float) -> dict[str, Any]:
    """What the judge says, with a score that can be trained on. RewardError if nothing of the kind.

    The session's own deadline comes first and says more; this one is for judges that hang where
    nobody can cancel them.
    """
    left = _LONG_S if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
    (verdict,) = await ask(reward, [state], timeout_s=left + STOP_S)
    return verdict


def _has_score(state: RolloutState) -> bool:
    return state.reward is not None and state.reward.get("score") is not None


def _canonical(states: list[RolloutState], session: Session) -> list[RolloutState]:
    """Make completed ones canonical; those that failed over it."""
    return canonicalize_group(states, lambda text: session.tokenizer.encode(text))


def _count_as_zero(states: list[RolloutState], session: Session) -> None:
    """An evaluation counts what failed: as completed, with score 0 and why it failed."""
    for state in states:
        if state.status is not Status.FAILED:
            continue
        reason, kind = state.error_msg, state.failure
        state.status = Status.COMPLETED
        state.reward = {"score": 0.0}
        if state.response_ids:  # judged badly or too late: its tokens are as good as any
            _canonical([state], session)
            state.status = Status.COMPLETED
        state.error_msg, state.failure = reason, kind


# -- time ------------------------------------------------------------------------------------


class _Overdue(Exception):
    pass


async def _bounded(work: Coroutine[Any, Any, _Result], deadline: float) -> _Result:
    """What `work` returns.

    It is a task of its own, so that one which ignores its cancellation keeps nobody waiting.

    Raises:
        _Overdue: it did not by the deadline; it was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
        await asyncio.wait({task}, timeout=left)
        if task.cancelled():
            raise RuntimeError("it was cancelled from within")
        if task.done():
            return task.result()
    except asyncio.CancelledError:
        await _stopped(task)
        raise
    await _stopped(task)
    raise _Overdue


async def _stopped(task: asyncio.Future[Any]) -> None:
    """Returns when a task has ended after it was cancelled, or does not seem to."""
    task.cancel()
    await asyncio.wait({task}, timeout=STOP_S)
    leave_behind(task)
