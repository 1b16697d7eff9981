"""What a capture does when it is asked: start runs and groups, end them, publish what they are.

Owns the order of these steps. Their turns are turns.py's; what HTTP makes of it all, and who may
ask, server.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentloop.capture import keys
from agentloop.capture.ending import Ended, Verdict, ended
from agentloop.capture.publisher import Publication, Publisher
from agentloop.capture.refusals import Refusal, conflict
from agentloop.capture.run import Outcome, Run, verdict_of
from agentloop.capture.runs import Runs
from agentloop.capture.settings import CaptureSettings
from agentloop.capture.starting import attempt_of, group_of, identity_of
from agentloop.capture.steps import Steps
from agentloop.capture.turns import Turns
from agentloop.capture.upstream import Upstream
from agentloop.trajectory.state import Status
from dataplane import AlreadyWritten, DataplaneError, RequestError, StaleWrite

_log = logging.getLogger(__name__)

_RETRY_S: Final = 5.0


class Capture:
    """One capture. For the coroutines of one event loop."""

    def __init__(
        self,
        settings: CaptureSettings,
        upstream: Upstream,
        publisher: Publisher,
        runs: Runs,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._publisher = publisher
        self._now = now
        self.runs = runs
        self.steps = Steps()
        self.turns = Turns(settings, upstream, runs, self.steps, now)

    # -- runs --------------------------------------------------------------------------------

    def start(self, body: Mapping[str, Any]) -> tuple[Run, str]:
        """A new run, and its key, which is not kept and cannot be had again.

        Raises:
            Refusal: 400: a field is wrong; 409: its uid and session are taken; 429: there are too
                many runs, or what is served is too old for the trainer.
            OSError: it could not be written down.
        """
        run_id = keys.new_run_id()
        known = {"global_steps": self.steps.global_steps, "task_name": self._settings.task_name}
        identity = identity_of(body, run_id, known)
        self.steps.check_lag(
            self.steps.version, self._settings.limits.max_lag, "what the server serves"
        )
        key = keys.new_key(run_id)
        run = Run(identity, keys.hashed(key), self.steps.version, touched_s=self._now())
        self.runs.start(run)
        return run, key

    def touch(self, run: Run) -> None:
        """Somebody asks for something of it."""
        run.touched_s = self._now()

    def drop(self, run: Run) -> None:
        """Nothing comes of this run. Refusal: 409: it is being published."""
        if run.phase == "ending":
            raise conflict("run_ending", f"run {run.run_id} is being published")
        was_live = run.phase != "ended"
        for keyed in run.keyed.values():
            if keyed.task is not None:
                keyed.task.cancel()
        self.runs.drop(run)
        run.shrink(Outcome({}, (404, "no_such_run", f"run {run.run_id} was dropped")))
        self.runs.counts.dropped_runs += was_live

    async def models(self) -> Any:
        """What the server lists. Refusal: 502 or 504."""
        return await self._upstream.models()

    # -- groups ------------------------------------------------------------------------------

    async def begin_group(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a group for the runs of one prompt, which are started with its attempt.

        Raises:
            Refusal: 400: the body is wrong; 409: the plane refuses it; 503: it has no room, or
                cannot be had.
        """
        uid, n, room = group_of(body)
        uid = uid or keys.new_run_id()
        try:
            attempt = await self._publisher.begin_group(uid, n, room)
        except DataplaneError as error:
            raise _refusal_of(error) from error
        return {"uid": uid, "attempt": attempt, "n": n}

    async def end_group(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """End a group, whose runs have ended; how it ended.

        Raises:
            Refusal: 400: the body is wrong; 409: it has ended before, or began anew; 503.
        """
        attempt = attempt_of(body)
        try:
            return {"attempt": attempt, "status": await self._publisher.end_group(attempt)}
        except DataplaneError as error:
            raise _refusal_of(error) from error

    # -- the end -----------------------------------------------------------------------------

    def judge(self, run: Run, body: Mapping[str, Any]) -> None:
        """Say a run's reward. Refusal: 400, 409."""
        run.judge(verdict_of(body))
        self.runs.judged(run)

    async def end(self, run: Run, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Publish a run; asked again, the same answer.

        Requests that are under way are not waited for, and not recorded when they come. Who gives
        up waiting does not stop it.

        Raises:
            Refusal: 400: the body is wrong; 409: it has no reward, another end of it is under way,
                it ended with another reward, its group was closed, or the plane refuses it;
                503: the plane could not be had: the run is kept, and may be ended again.
        """
        verdict = verdict_of(body)
        if run.phase == "ended":
            assert run.outcome is not None
            answer = run.outcome.answer()
            if verdict.reward is not None and verdict.reward != answer.get("reward"):
                raise conflict("run_ended", f"run {run.run_id} has ended with another reward")
            return answer
        if run.phase == "ending":
            raise Refusal(
                409, "run_ending", f"run {run.run_id} is being published", retry_after_s=1.0
            )
        if verdict != Verdict():
            run.judge(verdict)
            self.runs.judged(run)
        run.check_ready()
        return await self._end(run)

    async def _end(self, run: Run) -> Mapping[str, Any]:
        self.runs.closed(run)
        run.phase = "ending"
        run.ending = asyncio.create_task(self._publish(run))
        run.ending.add_done_callback(_seen)
        outcome = await asyncio.shield(run.ending)
        return outcome.answer()

    async def _publish(self, run: Run) -> Outcome:
        try:
            made = await asyncio.to_thread(
                ended, run.identity, run.tree, tuple(run.refused), run.verdict
            )
            outcome = await self._published(run, made)
        except BaseException:
            run.phase = "closed"
            run.ending = None
            self.touch(run)
            raise
        try:
            self.runs.end(run, outcome)
        except OSError as error:  # it is published; told so again after a restart, too
            _log.error("run %s: its end is not written down: %s", run.run_id, error)
        return outcome

    async def _published(self, run: Run, made: Ended) -> Outcome:
        counts = self.runs.counts
        try:
            await self._publisher.publish(Publication(run.identity, made))
        except (StaleWrite, AlreadyWritten) as error:
            counts.stale_runs += isinstance(error, StaleWrite)
            refusal = _refusal_of(error)
            return Outcome({}, (refusal.status, refusal.code, refusal.message))
        except DataplaneError as error:
            _log.warning("run %s is not published: %s", run.run_id, error)
            raise _refusal_of(error) from error
        failed = sum(state.status is Status.FAILED for state in made.states)
        counts.published_runs += 1
        counts.published_trajectories += len(made.states)
        counts.failed_trajectories += failed
        counts.rejected += len(made.rejected)
        return Outcome(_told(run, made))

    # -- time --------------------------------------------------------------------------------

    async def expire(self) -> int:
        """End the runs that nobody asks for anything; how many there were."""
        idle = self.runs.idle(self._now())
        for run in idle:
            if run.phase == "open":
                self.runs.counts.expired_runs += 1
                if self._settings.limits.on_idle == "drop":
                    self.drop(run)
                    continue
                if run.verdict.reward is None:  # else all was said but that it ends
                    run.judge(Verdict(finish_reason="abort", error="nobody asked for anything"))
                    self.runs.judged(run)
            try:
                await self._end(run)
            except Refusal as error:
                _log.warning("run %s was idle and is not ended: %s", run.run_id, error)
                if error.status == 503:
                    break  # nor are the others: they are looked at again
        return len(idle)

    async def close(self) -> None:
        """Wait for what is being published, and let go of everything."""
        ending = [run.ending for run in self.runs if run.ending is not None]
        await self.turns.stop()
        if ending:
            await asyncio.wait(ending)
        await self._upstream.close()
        if len(self.runs) and self._settings.journal is None:
            _log.warning("%d runs have not ended and are lost: there is no journal", len(self.runs))
        self.runs.close()


def _refusal_of(error: DataplaneError) -> Refusal:
    """What an error of the plane is for whoever asked."""
    if isinstance(error, StaleWrite):
        return conflict("attempt_closed", f"nothing was published: {error}")
    if isinstance(error, AlreadyWritten):
        return conflict("already_written", f"nothing was published: {error}")
    if isinstance(error, RequestError):
        return conflict("plane_refused", f"the plane refuses it: {error}")
    return Refusal(
        503, "plane_unavailable", f"the plane cannot be had; ask again: {error}",
        retry_after_s=_RETRY_S,
    )  # fmt: skip


def _seen(task: asyncio.Task[Any]) -> None:
    """What a task failed with has been said to whoever waited, should nobody do so any more."""
    if not task.cancelled():
        task.exception()


def _told(run: Run, made: Ended) -> dict[str, Any]:
    """The answer of an end."""
    return {
        "run_id": run.run_id,
        "status": "ended",
        "reward": run.verdict.reward,
        "trajectories": [
            {
                "key": state.key,
                "index": state.index,
                "status": str(state.status),
                "num_turns": state.num_turns,
                "seq_len": None if state.meta is None else state.meta.seq_len,
                "policy_len": None if state.meta is None else state.meta.policy_len,
                "error": state.error_msg,
            }
            for state in made.states
        ],
        "rejected": [{"name": one.name, "reason": one.reason} for one in made.rejected],
    }
