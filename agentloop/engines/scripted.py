"""An engine that answers from a script: tests, demonstrations and load without a model.

Owns answers, how long they take, and the faults that are asked for. Everything follows from the
script, the seed and the request; only what an interruption leaves depends on the clock.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentloop.engines.script import Script, Turn, make_script, with_logprobs
from agentloop.engines.types import Completion, EngineError, Request

if TYPE_CHECKING:
    import torch

    from agentloop.loops.chat import ChatTokenizer

_UNFINISHED: Final = 10_000
"""How many interrupted answers are kept, the newest ones."""


@dataclass(slots=True)
class _Answer:
    """An answer under way."""

    turn: Turn
    token_ids: list[int]
    began: float
    takes_s: float
    done: asyncio.Future[bool]
    """True: it was interrupted."""
    versions: list[int] = field(default_factory=list[int])
    """Of the tokens that are certain; the rest is of the version at the end."""

    def made(self, now: float) -> int:
        """How many of its tokens are there by now."""
        if self.turn.hold_after is not None:
            return min(self.turn.hold_after, len(self.token_ids))
        share = 1.0 if self.takes_s <= 0 else min((now - self.began) / self.takes_s, 1.0)
        return max(len(self.versions), int(share * len(self.token_ids)))


class ScriptedEngine:
    """Answers from a script. One object serves the sessions of one event loop.

    The script is a function, or a list with one entry for each turn of every session, as plain
    data: `{"token_ids": [...]}` or `{"text": "..."}`, with any other field of `Turn`. A text needs
    a `tokenizer`, and ends with its end token unless `finish_reason` is `length`.

    A request that continues an interrupted answer (the same tokens, and those that were made)
    gets the rest of it.
    """

    def __init__(
        self,
        script: Script | Sequence[Mapping[str, Any] | Turn],
        *,
        tokenizer: ChatTokenizer | None = None,
        seed: int = 0,
        latency_s: tuple[float, float] = (0.0, 0.0),
        policy_version: int = 0,
        error_rate: float = 0.0,
        experts: tuple[int, int, int] | None = None,
    ) -> None:
        """`latency_s` is the range that an answer takes, drawn for each request; `error_rate` the
        share of requests that fail; `experts` (layers, experts per token, experts) are made up
        where a request asks for them.

        Raises:
            ValueError: the script cannot be read.
        """
        if not 0 <= latency_s[0] <= latency_s[1]:
            raise ValueError(f"latency_s is a range of seconds, not {latency_s}")
        if not callable(script):
            script = make_script(script, tokenizer, seed)
        self._script: Script = script
        self._tokenizer = tokenizer
        self._seed = seed
        self._latency_s = latency_s
        self._policy_version = policy_version
        self._error_rate = error_rate
        self._experts = experts
        self._paused = False
        self._closed = False
        self._failing = 0
        self._failing_with = ""
        self._under_way: dict[str, _Answer] = {}
        self._unfinished: OrderedDict[tuple[int, ...], Turn] = OrderedDict()
        self.requests = 0
        """How many there were."""

    # -- Engine ------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(self, request: Request) -> Completion:
        self.requests += 1
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failing:
            self._failing -= 1
            raise EngineError(self._failing_with)
        turn = self._turn_of(request)
        if self._paused and not turn.ignores_abort:
            return self._completion(request, turn, [], [], "abort")
        answer = self._begin(request, turn)
        try:
            interrupted = await self._wait(request, answer)
        finally:
            del self._under_way[request.request_id]
        if interrupted and not turn.ignores_abort:
            return self._interrupted(request, answer)
        if turn.error is not None:
            raise EngineError(turn.error)
        if self._unfinished:
            self._unfinished.pop(tuple(request.token_ids), None)
        cut = len(answer.token_ids) < len(turn.token_ids)
        versions = self._versions(answer, len(answer.token_ids))
        reason = "length" if cut else turn.finish_reason
        return self._completion(request, turn, answer.token_ids, versions, reason)

    async def abort(self, request_id: str) -> None:
        answer = self._under_way.get(request_id)
        if answer is not None:
            self._interrupt(answer)

    async def pause(self) -> None:
        self._paused = True
        for answer in self._under_way.values():
            self._interrupt(answer)

    async def resume(self) -> None:
        self._paused = False

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        now = asyncio.get_running_loop().time()
        for answer in self._under_way.values():
            answer.versions = self._versions(answer, answer.made(now))
        self._policy_version = version

    async def close(self) -> None:
        self._closed = True
        await self.pause()

    # -- faults ------------------------------------------------------------------------------

    def fail_next(self, count: int = 1, reason: str = "the engine was told to fail") -> None:
        """The next so many requests fail, at once."""
        self._failing = count
        self._failing_with = reason

    @property
    def under_way(self) -> int:
        """How many requests are not answered yet."""
        return len(self._under_way)

    # -- an answer ---------------------------------------------------------------------------

    def _turn_of(self, request: Request) -> Turn:
        if self._unfinished:
            rest = self._unfinished.get(tuple(request.token_ids))
            if rest is not None:
                return rest
        turn = self._script(request)
        if self._error_rate and self._chance(request, "error") < self._error_rate:
            return replace(turn, error="an error drawn by the engine's error_rate")
        return turn

    def _begin(self, request: Request, turn: Turn) -> _Answer:
        if request.request_id in self._under_way:
            raise EngineError(f"request {request.request_id} is under way already")
        loop = asyncio.get_running_loop()
        low, high = self._latency_s
        takes_s = low if low == high else low + (high - low) * self._chance(request, "latency")
        answer = _Answer(
            turn,
            list(turn.token_ids[: request.sampling.max_tokens]),
            loop.time(),
            takes_s,
            loop.create_future(),
        )
        self._under_way[request.request_id] = answer
        return answer

    async def _wait(self, request: Request, answer: _Answer) -> bool:
        """Whether it was interrupted.

        Raises:
            EngineError: the request's time was over first.
        """
        limit = request.timeout_s
        holds = answer.turn.hold_after is not None
        late = limit is not None and (holds or answer.takes_s > limit)
        if not holds and not late and answer.takes_s <= 0:
            return False
        if not late and holds:
            return await answer.done
        loop = asyncio.get_running_loop()
        seconds = limit if late and limit is not None else answer.takes_s
        timer = loop.call_later(seconds, self._finish, answer)
        try:
            interrupted = await answer.done
        finally:
            timer.cancel()
        if late and not interrupted:
            raise EngineError(f"request {request.request_id}: no answer within {limit} s")
        return interrupted

    def _finish(self, answer: _Answer) -> None:
        if not answer.done.done():
            answer.done.set_result(False)

    def _interrupt(self, answer: _Answer) -> None:
        if not answer.done.done() and not answer.turn.ignores_abort:
            answer.done.set_result(True)

    def _interrupted(self, request: Request, answer: _Answer) -> Completion:
        """What there is by now; the rest is kept for who asks with all of it."""
        turn = answer.turn
        count = answer.made(asyncio.get_running_loop().time())
        given = answer.token_ids[:count]
        self._unfinished.pop(tuple(request.token_ids), None)
        self._unfinished[(*request.token_ids, *given)] = replace(
            turn,
            token_ids=turn.token_ids[count:],
            logprobs=None if turn.logprobs is None else turn.logprobs[count:],
            text="",
            hold_after=None,
        )
        while len(self._unfinished) > _UNFINISHED:
            self._unfinished.popitem(last=False)
        versions = self._versions(answer, count)
        return self._completion(request, turn, given, versions, "abort")

    def _versions(self, answer: _Answer, count: int) -> list[int]:
        known = answer.versions[:count]
        return [*known, *([self._policy_version] * (count - len(known)))]

    def _completion(
        self,
        request: Request,
        turn: Turn,
        token_ids: list[int],
        versions: list[int],
        finish_reason: str,
    ) -> Completion:
        logprobs = None
        if request.sampling.logprobs:
            whole = with_logprobs(turn, self._seed).logprobs
            logprobs = None if whole is None else list(whole[: len(token_ids)])
        text = turn.text
        if (not text or len(token_ids) < len(turn.token_ids)) and self._tokenizer is not None:
            text = self._tokenizer.decode(token_ids) if token_ids else ""
        return Completion(
            token_ids,
            logprobs,
            versions,
            text,
            finish_reason,
            logprob_kind=None if logprobs is None else "processed",
            routed_experts=self._routed(request, token_ids),
            extra=dict(turn.extra),
        )

    def _routed(self, request: Request, token_ids: list[int]) -> npt.NDArray[Any] | None:
        if not request.sampling.routed_experts or self._experts is None:
            return None
        layers, per_token, experts = self._experts
        inputs = np.array([*request.token_ids, *token_ids][:-1], np.int64)
        columns = np.arange(layers * per_token)
        return ((inputs[:, None] + columns) % experts).astype(np.uint16)

    def _chance(self, request: Request, what: str) -> float:
        """A number of [0, 1) that follows from the seed and the request."""
        return zlib.crc32(f"{self._seed} {what} {request.request_id}".encode()) / 2**32
