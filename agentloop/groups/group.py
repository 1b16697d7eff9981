"""One group: the sessions of one prompt under one attempt, from its begin to its end.

The order is what consumers rely on: the group begins, every session publishes its trajectories in
one put, and only when all of them have settled does the prompt's row take its last status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome, MemberOutcome
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.publish import interrupted_states, publish
from agentloop.groups.task import Policy, Task
from agentloop.loops.loop import Session
from agentloop.loops.session_run import run_session
from agentloop.trajectory.state import RolloutState, Status, group_status
from dataplane import AsyncClient, DataplaneError, StaleWrite

_log = logging.getLogger(__name__)

_NOT_STOPPED = "it was asked to stop and did not end in time"

GIVE_UP_S = 5.0
"""How long a session that was cancelled may take to end before nobody waits for it."""


class Group:
    """A group that a worker runs. Used once."""

    def __init__(
        self,
        job: GroupJob,
        task: Task,
        client: AsyncClient,
        publishing: asyncio.Semaphore | None = None,
        clock: PlaneClock | None = None,
    ) -> None:
        """`publishing` bounds how many sessions of all groups are published at the same time;
        `clock` counts the time of the plane's calls."""
        self._job = job
        self._task = task
        self._client = client
        self._publishing = publishing or asyncio.Semaphore(1)
        self._clock = clock or PlaneClock()
        self._abort_requested = asyncio.Event()
        self._given_up = asyncio.Event()
        self._sessions: list[asyncio.Task[None]] = []
        self._members: list[list[RolloutState]] = [[state] for state in job.states()]
        """[session][trajectory]"""
        self._known_tokens: dict[str, int] = {}
        """How many tokens a trajectory had when this call began, by key."""

    async def run(self) -> GroupOutcome:
        """Run its sessions and end it.

        A group that is interrupted stays open, and its outcome names the attempt to go on with.

        Raises:
            StaleWrite: its attempt was closed by somebody else, who has the prompt now.
            DataplaneError: the plane could not be had; the group is as far as it came.
        """
        started = time.monotonic()
        attempt = await self._begin()
        if attempt is None:
            return self._outcome(Status.ABORTED, None, 0.0)
        self._forget()
        self._known_tokens = {
            state.key: len(state.response_model_steps) for state in self._states()
        }
        self._sessions = [
            asyncio.create_task(self._session(session_id, attempt))
            for session_id in range(self._job.n)
        ]
        try:
            await self._settled()
        finally:
            for session in self._sessions:
                session.cancel()
        for session_id, session in enumerate(self._sessions):
            if session.done() and not session.cancelled():
                session.result()
            else:
                await self._abandon(session_id, attempt)
        return await self._end(attempt, time.monotonic() - started)

    def request_abort(self) -> None:
        """Its sessions are to stop with what they have."""
        self._abort_requested.set()

    async def give_up(self) -> None:
        """End the sessions that did not stop: they count as aborted, whatever comes of them."""
        late = [session for session in self._sessions if not session.done()]
        for session in late:
            session.cancel()
        if late:
            await asyncio.wait(late, timeout=GIVE_UP_S)
        self._given_up.set()

    # -- begin -------------------------------------------------------------------------------

    async def _begin(self) -> int | None:
        """The attempt; None if the group was interrupted before it was let in."""
        job = self._job
        if job.attempt is not None:
            with self._clock.call():
                self._members = await interrupted_states(self._client, job)
            return job.attempt
        beginning = asyncio.create_task(
            self._client.begin_group(
                job.uid,
                self._job.partition_id,
                n=job.n,
                declared_bytes=self._task.declared_bytes,
                timeout=self._task.admission_timeout_s,
            )
        )
        aborted = asyncio.create_task(self._abort_requested.wait())
        try:
            await asyncio.wait({beginning, aborted}, return_when=asyncio.FIRST_COMPLETED)
            # If it is let in all the same, whoever begins it next closes that attempt.
            return beginning.result() if beginning.done() else None
        finally:
            beginning.cancel()
            aborted.cancel()

    async def _settled(self) -> None:
        """Returns when every session has ended, or those that have not were given up."""
        given_up = asyncio.create_task(self._given_up.wait())
        left: set[asyncio.Task[None]] = set(self._sessions)
        try:
            while left and not self._given_up.is_set():
                done, _ = await asyncio.wait({*left, given_up}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
        finally:
            given_up.cancel()

    # -- sessions ----------------------------------------------------------------------------

    def _forget(self) -> None:
        """Sessions that begin anew do so from their prompts."""
        for states in self._members:
            interrupted = any(state.status is not Status.COMPLETED for state in states)
            if interrupted and (len(states) > 1 or not self._task.partial_rollout):
                states[0].reset()
                states[0].status = Status.INIT

    def _states(self) -> Iterable[RolloutState]:
        return (state for states in self._members for state in states)

    async def _session(self, session_id: int, attempt: int) -> None:
        before = self._members[session_id]
        if all(state.status is Status.COMPLETED for state in before):
            return  # kept from before an interruption
        session = Session(
            engine=self._task.engine,
            tokenizer=self._task.tokenizer,
            sampling=self._task.sampling_of(self._job, session_id),
            turn_timeout_s=self._task.turn_timeout_s,
            abort_requested=self._abort_requested,
            evaluates=self._task.evaluates,
        )
        states = await run_session(
            self._task.loop, before[0], session, self._task.reward,
            timeout_s=self._task.session_timeout_s,
        )  # fmt: skip
        if self._given_up.is_set():
            return  # the group has ended without it
        async with self._publishing:
            await self._publish(session_id, states, attempt)

    async def _publish(self, session_id: int, states: list[RolloutState], attempt: int) -> None:
        if self._job.attempt is not None:
            # A put adds to what there is, and these rows are to hold nothing of an earlier call.
            await self._clear(self._members[session_id])
        try:
            await publish(self._client, states, self._job, attempt, self._clock)
        except StaleWrite:
            self._abort_requested.set()  # nothing of this group will be taken any more
            raise
        except DataplaneError as error:
            # No room for it, or a field that the partition cannot hold: this session has failed.
            await self._clear(states)
            states = [_unpublished(self._job.states()[session_id], f"publishing failed: {error}")]
            await publish(self._client, states, self._job, attempt, self._clock)
        self._members[session_id] = states

    async def _clear(self, states: Iterable[RolloutState]) -> None:
        keys = [state.key for state in states]
        with self._clock.call():
            await self._client.kv_clear(keys, self._job.partition_id)

    async def _abandon(self, session_id: int, attempt: int) -> None:
        """The session was cancelled, or still runs although it was: its row says so."""
        state = self._job.states()[session_id]
        state.status = Status.ABORTED
        state.finish_reason = "abort"
        state.error_msg = _NOT_STOPPED
        await self._publish(session_id, [state], attempt)

    # -- end ---------------------------------------------------------------------------------

    async def _end(self, attempt: int, took_s: float) -> GroupOutcome:
        states = list(self._states())
        status = group_status(state.status for state in states)
        if status in (Status.ABORTED, Status.EXPIRED):
            return self._outcome(status, attempt, took_s)
        if status is Status.COMPLETED and not self._is_valid(states):
            status = Status.FILTERED
        policy: Policy = "fail"
        if status is not Status.COMPLETED:
            policy = self._task.filtered if status is Status.FILTERED else self._task.incomplete
        with self._clock.call():
            await self._close(attempt, states, status, policy, took_s)
        return self._outcome(status, None, took_s)

    async def _close(
        self,
        attempt: int,
        states: list[RolloutState],
        status: Status,
        policy: Policy,
        took_s: float,
    ) -> None:
        """Give the prompt its last status, or clear what there is of the group."""
        if policy == "fail":
            tags: dict[str, object] = {"group_generate_time_s": took_s}
            if status is Status.FILTERED:
                tags["status"] = str(status)
            keys = [state.key for state in states]
            await self._client.kv_batch_put(
                keys, self._job.partition_id, tags=[tags] * len(keys), attempt=attempt
            )
            end = "finished" if status is Status.COMPLETED else "failure"
            await self._client.end_group(attempt, end)
        else:
            await self._client.kv_clear(
                None, self._job.partition_id, where={"uid": self._job.uid}, retire=True
            )

    def _is_valid(self, states: list[RolloutState]) -> bool:
        hook = self._task.is_valid_sample
        if hook is None:
            return True
        try:
            return hook(states)
        except Exception:
            _log.exception(
                "is_valid_sample of task %s failed; the group is filtered", self._job.task
            )
            return False

    def _outcome(self, status: Status, attempt: int | None, took_s: float) -> GroupOutcome:
        return GroupOutcome(
            uid=self._job.uid,
            task=self._job.task,
            status=status,
            members=tuple(
                MemberOutcome(
                    status=state.status,
                    new_tokens=len(state.response_ids or ()) - self._known_tokens.get(state.key, 0),
                    score=None if state.reward is None else state.reward.get("score"),
                    failure=state.failure,
                )
                for state in self._states()
            ),
            attempt=attempt,
            group_generate_time_s=took_s,
            error_msg=_NOT_STOPPED if self._given_up.is_set() else None,
        )


def _unpublished(state: RolloutState, reason: str) -> RolloutState:
    state.fail(reason, "publish")
    return state
