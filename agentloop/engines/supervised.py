"""An engine in a process of its own, which is started again when it dies.

Owns what becomes of requests, pauses and updates when that happens; `supervisor.py` owns the
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from agentloop.engines.messages import pack_request, unpack_completion
from agentloop.engines.supervisor import Supervisor
from agentloop.engines.types import Completion, EngineError, LogprobKind, Request
from agentloop.processes.child import Child, ChildDied

if TYPE_CHECKING:
    import torch

_GRACE_S: Final = 2.0
"""The engine itself keeps a request's deadline and says more about it; this is for when it
cannot."""
_PING_S: Final = 10.0
_DEATHS: Final = 2
"""Of processes under one request or update, until it is given up."""


class SupervisedEngine:
    """Any engine, in a child process. Belongs to one event loop.

    The process is started by the first call, or by `start`. When it dies, requests under way are
    asked once more of the next process, within their own time; what had been generated is lost.
    The next process has the weights and the version of the last update before it generates. The
    process ends with `close`, and when this process ends in whatever way.
    """

    def __init__(
        self,
        engine: str = "agentloop.engines.hf:HFEngine",
        options: Mapping[str, Any] | None = None,
        *,
        max_restarts: int = 5,
        backoff_s: float = 0.2,
        max_backoff_s: float = 30.0,
        start_timeout_s: float = 300.0,
        control_timeout_s: float = 300.0,
        weights_dir: str | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            engine: `module:name` of a class or function that makes an engine, in the child.
            options: Its arguments by name, as plain data.
            max_restarts: Deaths in a row, without a request answered, that are borne.
            backoff_s: Wait before the first restart of a row; doubles up to `max_backoff_s`.
            start_timeout_s: For loading the model; a process that takes longer is killed.
            control_timeout_s: For pause, resume and new weights; likewise.
            weights_dir: Where the last update is kept; the temporary folder by default.
        """
        self._supervisor = Supervisor(
            engine,
            options or {},
            max_restarts=max_restarts,
            backoff_s=backoff_s,
            max_backoff_s=max_backoff_s,
            start_timeout_s=start_timeout_s,
            weights_dir=weights_dir,
        )
        self._control_timeout_s = control_timeout_s
        self._updating = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._flights: set[_Flight] = set()
        self._kind: LogprobKind | None = None
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._supervisor.version

    @property
    def restarts(self) -> int:
        """How often a process was started in place of one that died."""
        return self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        """Of the process, while one is ready."""
        child = self._supervisor.child
        return None if child is None else child.pid

    async def start(self) -> None:
        """Start the process now. EngineError if the engine cannot be made."""
        await self._supervisor.running()

    # -- requests ----------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        flight = _Flight(request)
        self._flights.add(flight)
        try:
            return await self._generate(flight)
        finally:
            self._flights.discard(flight)
            flight.over.set()

    async def _generate(self, flight: _Flight) -> Completion:
        request = flight.request
        died: list[str] = []
        while True:
            try:
                async with asyncio.timeout_at(flight.deadline):
                    child = await self._ready(flight)
                if child is None:
                    return self._nothing(request)
                async with asyncio.timeout(flight.left(_GRACE_S)):
                    plain = pack_request(replace(request, timeout_s=flight.left()))
                    completion = unpack_completion(await child.call("generate", plain))
            except ChildDied as error:
                died += [str(error)] * error.asked
                if len(died) == _DEATHS:
                    raise EngineError(
                        f"the engine's process died under request {request.request_id!r}, and so "
                        f"did the next one: {died[0]}, then {died[1]}"
                    ) from error
            except TimeoutError:
                self._look_after()
                raise EngineError(
                    f"request {request.request_id!r} was not answered in {request.timeout_s} s"
                    + (f"; the engine's process had died under it: {died[0]}" if died else "")
                ) from None
            else:
                self._supervisor.works()
                self._kind = completion.logprob_kind or self._kind
                return completion

    def _nothing(self, request: Request) -> Completion:
        """What a request has that ends before any process was asked."""
        logprobs: list[float] | None = [] if request.sampling.logprobs else None
        return Completion(
            [], logprobs, [], "", "abort",
            logprob_kind=self._kind, prompt_ids=list(request.token_ids),
        )  # fmt: skip

    async def _ready(self, flight: _Flight) -> Child | None:
        """The process, as soon as it is up; None if the request ends before."""
        if self._supervisor.paused or flight.stopped.is_set():
            return None
        if self._supervisor.child is not None:
            return self._supervisor.child
        up = asyncio.create_task(self._supervisor.running())
        stop = asyncio.create_task(flight.stopped.wait())
        try:
            await asyncio.wait({up, stop}, return_when=asyncio.FIRST_COMPLETED)
            return None if stop.done() else await up
        finally:
            up.cancel()
            stop.cancel()
            await asyncio.gather(up, stop, return_exceptions=True)

    def _look_after(self) -> None:
        """Kill a process that let a request's time pass, unless it still answers."""
        child = self._supervisor.child
        if child is not None:
            self._in_background(self._control(child, "ping", timeout_s=_PING_S))

    # -- the other verbs ---------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        flights = [f for f in self._flights if f.request.request_id == request_id]
        for flight in flights:
            flight.stopped.set()
        child = self._supervisor.child
        if flights and child is not None:
            await self._control(child, "abort", request_id)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._supervisor.paused = True
        under_way = list(self._flights)
        for flight in under_way:
            flight.stopped.set()
        if self._supervisor.child is not None:
            await self._control(self._supervisor.child, "pause")
        for flight in under_way:
            await flight.over.wait()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._supervisor.paused = False
        if self._supervisor.child is not None:
            await self._control(self._supervisor.child, "resume")

    async def _control(
        self, child: Child, verb: str, arguments: Any = None, *, timeout_s: float | None = None
    ) -> None:
        """Tell the process; one that does not answer in time is killed. A death is no error: the
        next process is told when it starts."""
        try:
            async with asyncio.timeout(timeout_s or self._control_timeout_s):
                await child.call(verb, arguments)
        except TimeoutError:
            child.kill()
        except ChildDied:
            pass

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See `Engine.update_weights`. The tensors have been read when this returns.

        A call that is cancelled goes on by itself: the engine has the new weights or the old.

        Raises:
            WeightsError: they do not fit; the engine goes on with those it had.
            EngineError: the process died under the update, and so did the next one; likewise.
        """
        await asyncio.shield(self._in_background(self._update(weights, version)))

    async def _update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        async with self._updating:
            path = await self._supervisor.write_weights(weights)
            try:
                await self._tell_weights(str(path), version)
            except BaseException:
                self._supervisor.drop_weights(path)
                raise
            self._supervisor.keep_weights(path, version)

    async def _tell_weights(self, path: str, version: int) -> None:
        died: list[str] = []
        while len(died) < _DEATHS:
            child = await self._supervisor.running()
            try:
                async with asyncio.timeout(self._control_timeout_s):
                    await child.call("update", {"path": path, "version": version})
                return
            except TimeoutError:
                child.kill()
                died.append(f"killed for not answering in {self._control_timeout_s} s")
            except ChildDied as error:
                died += [str(error)] * error.asked
        raise EngineError(
            f"the engine's process died under the update to version {version}, and so did the "
            f"next one: {died[0]}, then {died[1]}; it goes on with version {self.policy_version}"
        )

    async def close(self) -> None:
        """End the process; what is under way fails. Repeatable."""
        if self._closed:
            return
        self._closed = True
        await self._supervisor.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Flight:
    """A request from when it was asked to when it is answered."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stopped = asyncio.Event()
        """It was paused or aborted: it does not wait for a process any more."""
        self.over = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        budget = request.timeout_s
        self.deadline = None if budget is None else self._clock() + budget

    def left(self, extra_s: float = 0.0) -> float | None:
        """Seconds of its budget, and so many more."""
        if self.deadline is None:
            return None
        return max(self.deadline - self._clock() + extra_s, 0.001)
