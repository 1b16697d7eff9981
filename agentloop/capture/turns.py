"""Chat requests of runs: passed on, answered, recorded, once each.

Owns what becomes of a request whose agent goes away, asks again, or comes when its run has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from agentloop.capture.answering import answer_of, message_of
from agentloop.capture.asking import Asked, asked_of, forwarded
from agentloop.capture.plain import what_is_not_plain
from agentloop.capture.recording import Kept, Known, read, refused_turn, turn_of
from agentloop.capture.refusals import Refusal, conflict, invalid
from agentloop.capture.run import Keyed, Run
from agentloop.capture.runs import Runs
from agentloop.capture.settings import CaptureSettings
from agentloop.capture.steps import Steps
from agentloop.capture.upstream import Upstream
from agentloop.engines.shapes.checks import RefusedReply

_log = logging.getLogger(__name__)

_MAX_KEY: Final = 256


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn's answer, and whether it was there before."""

    answer: Mapping[str, Any]
    asked: Asked
    number: int | None
    """None if it is answered from what is known: nothing is to be undone."""


class Turns:
    """Takes the chat requests of all runs. For the coroutines of one event loop."""

    def __init__(
        self,
        settings: CaptureSettings,
        upstream: Upstream,
        runs: Runs,
        steps: Steps,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._runs = runs
        self._steps = steps
        self._now = now
        self._requests = 0

    @contextmanager
    def place(self) -> Generator[None]:
        """For as long as a chat request is here, from before its body is read. Refusal: 429: there
        are too many."""
        if self._requests >= self._settings.limits.max_requests:
            raise Refusal(
                429, "too_many_requests", f"{self._requests} requests are under way, the most "
                "there may be", retry_after_s=1.0,
            )  # fmt: skip
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def chat(self, run: Run, raw: bytes, idempotency_key: str | None = None) -> Answered:
        """The answer to a chat request, recorded as a turn of the run.

        A request whose key was seen before is answered as it was then, and waits for that answer if
        it is still to come. Without a key, who gives up waiting ends the request at the server.

        Raises:
            Refusal: 400, 409, 413, 429: see the table of server.py; 502, 504: of the server;
                507: it could not be written down. No turn was recorded.
        """
        asked = asked_of(raw)
        if idempotency_key is None:
            number = self._begin(run, len(raw))
            answer = await self._turn(run, asked, number, None)
            return Answered(answer, asked, number)
        if not 0 < len(idempotency_key) <= _MAX_KEY:
            raise invalid(f"an idempotency key has 1 to {_MAX_KEY} characters")
        digest = hashlib.sha256(raw).hexdigest()
        known = run.keyed.get(idempotency_key)
        if known is not None and known.digest != digest:
            raise conflict("idempotency_key_reused", "this idempotency key was another request's")
        if known is not None and known.answer is not None:
            run.check_open()
            self._runs.counts.repeated_turns += 1
            return Answered(json.loads(known.answer), asked, None)
        if known is None or known.task is None:
            number = self._begin(run, len(raw))
            known = run.keyed[idempotency_key] = Keyed(digest)
            known.task = asyncio.create_task(
                self._keyed_turn(run, asked, number, idempotency_key, digest)
            )
            known.task.add_done_callback(_seen)
        else:
            self._runs.counts.repeated_turns += 1
        return Answered(await self._result(known.task), asked, None)

    async def _result(self, task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """What a request that others may wait for too is answered with."""
        await asyncio.wait({task})
        if task.cancelled():
            raise conflict("run_ended", "the run has ended")
        return task.result()

    async def _keyed_turn(
        self, run: Run, asked: Asked, number: int, idempotency_key: str, digest: str
    ) -> dict[str, Any]:
        try:
            return await self._turn(run, asked, number, (idempotency_key, digest))
        finally:
            here = run.keyed.get(idempotency_key)
            if here is not None and here.answer is None:
                del run.keyed[idempotency_key]  # it failed, and may be asked again

    def _begin(self, run: Run, request_bytes: int) -> int:
        limits = self._settings.limits
        run.check_open()
        self._steps.check_lag(run.version, limits.max_lag, f"run {run.run_id}", retry=False)
        self._runs.check_room()
        return run.begin_turn(limits, request_bytes)

    async def _turn(
        self, run: Run, asked: Asked, number: int, keyed: tuple[str, str] | None
    ) -> dict[str, Any]:
        try:
            known, model = await self._upstream.known(self._steps.policy_version)
            body = forwarded(asked, known.shape, model, self._settings.upstream.forced)
            reply = await self._upstream.chat(known.shape, body, f"{run.run_id}-{number}")
            answer = answer_of(reply, asked)
            self._record(run, asked, body, reply, known, number, answer, keyed)
            return answer
        finally:
            run.under_way.discard(number)
            run.touched_s = self._now()

    def _record(
        self,
        run: Run,
        asked: Asked,
        body: Mapping[str, Any],
        reply: object,
        known: Known,
        number: int,
        answer: Mapping[str, Any],
        keyed: tuple[str, str] | None,
    ) -> None:
        """Have the turn, or why it is none. Nothing is awaited, so it is whole or not at all."""
        if run.phase != "open":
            self._runs.counts.late_turns += 1
            run.check_open()
        messages = [*asked.messages, _answered(answer)]
        kept = None if keyed is None else Kept(*keyed, json.dumps(answer))
        try:
            wrong = what_is_not_plain(messages[-1])
            if wrong is not None:
                raise RefusedReply("shape", "message", f"holds {wrong}")
            completion = read(reply, asked, body, known)
        except RefusedReply as error:
            _log.warning("run %s, turn %d: %s", run.run_id, number, error)
            turn = refused_turn(error, reply, number, messages)
        else:
            turn = turn_of(completion, number, run.tree, messages, known, kept)
            if turn.spans:
                newest = max(version for version, _ in turn.spans)
                self._steps.serves(newest)
                run.version = newest if run.version is None else run.version
        try:
            self._runs.add(run, turn)
        except OSError as error:
            _log.error("run %s: turn %d is not written down: %s", run.run_id, number, error)
            raise Refusal(
                507, "journal_failed", "the turn could not be written down and is not recorded"
            ) from error
        if kept is not None and run.keyed.get(kept.idempotency_key) is not None:
            run.keyed[kept.idempotency_key].answer = kept.answer  # of a refused turn, too

    async def stop(self) -> None:
        """End the requests that have a key; the others end with their connections."""
        tasks = [keyed.task for run in self._runs for keyed in run.keyed.values()]
        waiting = [task for task in tasks if task is not None]
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


def _answered(answer: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return message_of(answer)
    except (AttributeError, IndexError, TypeError):  # what the checks say of it is what counts
        return {"role": "assistant", "content": ""}


def _seen(task: asyncio.Task[Any]) -> None:
    """What a task failed with has been said to whoever waited, should nobody do so any more."""
    if not task.cancelled():
        task.exception()
