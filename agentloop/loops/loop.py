"""What an agent loop is, and what it is given to run with."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentloop.engines.types import Completion, Engine, Request, Sampling
from agentloop.loops.chat import ChatTokenizer
from agentloop.trajectory.experts import joined_experts
from agentloop.trajectory.state import Message, RolloutState

_Result = TypeVar("_Result")


class SessionAborted(Exception):
    """The session was asked to stop while it waited for something else than the engine."""


@dataclass(slots=True)
class Session:
    """One run of an agent loop for one prompt: the engine, and how far it may go."""

    engine: Engine
    tokenizer: ChatTokenizer
    sampling: Sampling = field(default_factory=Sampling)
    """Of the whole response: a turn gets what is left of `max_tokens`."""
    turn_timeout_s: float | None = 600.0
    abort_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is to stop with what it has. Loops look at it between turns; engines that
    are paused end the turn that is under way."""
    evaluates: bool = False
    """For evaluation: nothing of it is trained."""
    _turns: int = 0

    def tokens_left(self, state: RolloutState) -> int:
        """How many more tokens the response may have."""
        return self.sampling.max_tokens - len(state.response_ids or ())

    async def generate(
        self,
        state: RolloutState,
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
    ) -> Completion:
        """One turn of the policy, appended to the response; `state.turn_ids` is all of it.

        Sets `finish_reason`, counts the turn once it has ended, and makes `prompt_ids` of the
        prompt's messages if there are none. Nothing is asked of the engine, and nothing is
        appended, if a response that was interrupted had ended its turn all the same (`stop`), or
        no token is left (`length`).

        Raises:
            EngineError: the engine could not answer; the state is as it was.
            ValueError: the engine's answer does not fit the response that it continues.
        """
        if not state.prompt_ids:
            state.prompt_ids = self.tokenizer.prompt(state.messages, tools)
        ended = self._turns == 0 and state.turn_ids[-1:]
        self._turns += 1
        if ended and ended[0] in self.tokenizer.eos_ids:
            return self._unasked(state, "stop")
        left = self.tokens_left(state)
        if left <= 0:
            return self._unasked(state, "length")
        sampling = replace(self.sampling, max_tokens=left, stop=(*self.sampling.stop, *stop))
        completion = await self.engine.generate(
            Request(
                request_id=f"{state.uid}_{state.session_id}_{state.index}:{self._turns}",
                token_ids=state.tokens,
                sampling=sampling,
                turn=state.num_turns,
                messages=messages or state.messages,
                tools=tools,
                timeout_s=self.turn_timeout_s,
            )
        )
        state.append_generated(completion.token_ids, completion.logprobs, completion.versions)
        if completion.routed_experts is not None:
            state.routed_experts = joined_experts(state.routed_experts, completion.routed_experts)
        if completion.ids_source != "engine":
            state.ids_source = completion.ids_source  # one such turn marks the whole response
        state.logprob_kind = completion.logprob_kind or state.logprob_kind
        state.finish_reason = completion.finish_reason
        if completion.finish_reason != "abort":
            state.num_turns += 1  # an aborted turn goes on as the same turn
        return completion

    async def unless_aborted(
        self, work: Coroutine[Any, Any, _Result], *, grace_s: float = 0.0
    ) -> _Result:
        """What `work` returns, unless the session is asked to stop first.

        Then `work` has `grace_s` to end, and is cancelled. Nobody waits for it after that.

        Raises:
            SessionAborted: it did not end in time.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.sleep(0)  # much of it is done by then, and needs nobody to watch
            if not task.done():
                aborted = asyncio.ensure_future(self.abort_requested.wait())
                try:
                    await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    aborted.cancel()
            if not task.done() and grace_s > 0:
                await asyncio.wait({task}, timeout=grace_s)
            if not task.done():
                raise SessionAborted
            return task.result()
        finally:
            leave_behind(task)

    def _unasked(self, state: RolloutState, finish_reason: str) -> Completion:
        state.finish_reason = finish_reason
        return Completion([], None, [], "", finish_reason)


_LEFT_BEHIND: set[asyncio.Future[Any]] = set()
"""Tasks that nobody waits for: a loop holds them but weakly."""


def leave_behind(task: asyncio.Future[Any]) -> None:
    """Cancel a task and let it end by itself, however long that takes; its result is dropped."""
    if task.done():
        _forget(task)
        return
    task.cancel()
    _LEFT_BEHIND.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Future[Any]) -> None:
    _LEFT_BEHIND.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody is told of it later


class AgentLoop(ABC):
    """Turns a prompt into trajectories. Subclasses write `run`; one object serves many sessions."""

    @abstractmethod
    async def run(
        self, state: RolloutState, session: Session
    ) -> RolloutState | Sequence[RolloutState]:
        """Run one session, and return its trajectory or trajectories.

        `state` has messages, `prompt_ids` and the dataset's row; it may hold the begin of a
        response that was interrupted, to be continued. Set `response` to the final answer's text
        and `finish_reason` (`session.generate` does); the rest (status, reward, canonical fields,
        publishing) is done by who calls. An exception fails this session and no other.
        """
