"""A few child processes that judge answers which could hang, eat memory or crash.

Checkers of mathematics call a computer algebra system, and that on what a model wrote: one answer
can keep it busy for hours, inside C code that neither a thread nor a signal handler can stop. So
each answer is judged in a process that can be killed. Questions and answers are JSON; nothing is
pickled either way. The other side is `judge_process.py`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, cast

from agentloop.datasets.child import child_environment, python_child
from agentloop.rewards.types import RewardError

QUESTION_BYTES: Final = 16 << 20
ANSWER_BYTES: Final = 1 << 20


class Overrun(RewardError):
    """It took too long over this answer, or died of it."""


class JudgeProcesses:
    """Processes of one judge. They start when they are needed, and are replaced when they die.

    For the coroutines of one event loop.
    """

    def __init__(
        self,
        judge: str,
        *,
        processes: int = 2,
        memory_bytes: int = 2 << 30,
        start_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            judge: A name of `judge_process.JUDGES`.
            processes: How many answers are judged at once.
            memory_bytes: Address space of one process.
            start_timeout_s: How long a process may take to start; algebra systems take seconds.
        """
        if processes < 1:
            raise ValueError(f"processes: at least 1; got {processes}")
        self._judge = judge
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False
        self.started = 0
        """Processes started so far, replacements included."""

    async def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """What the judge says to one question. Its time begins when a process is free for it.

        Raises:
            Overrun: the answer took longer, or the process died of it twice; it was replaced.
            RewardError: the judge raised, or its process cannot start.
        """
        try:
            text = json.dumps({**question, "cpu_s": timeout_s + 1.0}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(f"{self._judge}: the row has no JSON form: {error}") from error
        if len(text) > QUESTION_BYTES:
            raise RewardError(
                f"{self._judge}: the question has {len(text)} bytes; the limit is {QUESTION_BYTES}"
            )
        async with self._free:
            # The kernel may have killed the process for somebody else's memory: once more.
            answer = await self._once(text, timeout_s) or await self._once(text, timeout_s)
        if answer is None:
            raise Overrun(f"{self._judge}: two processes in a row died of this answer")
        if "error" in answer:
            raise RewardError(f"{self._judge}: {answer['error']}")
        return answer

    async def ask_each(
        self,
        questions: Sequence[Mapping[str, Any]],
        *,
        timeout_s: float,
        overrun_score: float | None,
    ) -> list[dict[str, Any]]:
        """The answer to each question, in order. One that overran is `overrun_score`, if given.

        Raises:
            RewardError: one could not be judged; the others have been by then.
        """
        asked = (self.ask(question, timeout_s=timeout_s) for question in questions)
        answers: list[dict[str, Any]] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, Overrun) and overrun_score is not None:
                answers.append({"score": overrun_score, "overran": True})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        return answers

    async def _once(self, text: bytes, timeout_s: float) -> dict[str, Any] | None:
        """The answer, or None if the process died."""
        process = await self._take()
        answer: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await process.ask(text)
        except TimeoutError:
            raise Overrun(f"{self._judge} did not answer within {timeout_s:g} s") from None
        finally:
            if answer is None or self._closed:
                self._all.discard(process)
                process.kill()
            else:
                self._idle.append(process)
        return answer

    async def _take(self) -> _Process:
        if self._closed:
            raise RewardError(f"{self._judge}: its processes are closed")
        if self._idle:
            return self._idle.pop()
        process = _Process.begin(self._judge, self._memory_bytes)
        self._all.add(process)
        self.started += 1
        ready: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await process.receive()
        except TimeoutError:
            raise RewardError(
                f"{self._judge}: its process was not ready after {self._start_timeout_s:g} s"
            ) from None
        finally:
            if ready is None or "error" in ready:
                self._all.discard(process)
                process.kill()
        if ready is None:
            raise RewardError(f"{self._judge}: its process died while it started")
        if "error" in ready:
            raise RewardError(f"{self._judge}: its process cannot start: {ready['error']}")
        return process

    async def close(self) -> None:
        """End the processes. What is asked meanwhile fails."""
        self._closed = True
        self._idle.clear()
        while self._all:
            self._all.pop().kill()


class _Process:
    """One child, and the socket that is its standard input and output."""

    def __init__(self, child: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self._child = child
        self._socket: socket.socket | None = ours
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def begin(cls, judge: str, memory_bytes: int) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                python_child("agentloop.rewards.judge_process", judge, str(memory_bytes)),
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
                env=child_environment(), start_new_session=True,
            )  # fmt: skip
        return cls(child, ours)

    async def ask(self, text: bytes) -> dict[str, Any] | None:
        """The answer; None if the process died or said something that is no answer."""
        _, writer = await self._streams()
        try:
            writer.write(len(text).to_bytes(4, "big") + text)
            await writer.drain()
        except OSError:
            return None
        return await self.receive()

    async def receive(self) -> dict[str, Any] | None:
        reader, _ = await self._streams()
        try:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > ANSWER_BYTES:
                return None
            said = json.loads(await reader.readexactly(size))
        except (OSError, EOFError, ValueError, RecursionError):
            return None
        return cast(dict[str, Any], said) if isinstance(said, dict) else None

    async def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            ours, self._socket = self._socket, None
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        return self._reader, self._writer

    def kill(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._socket is not None:
            self._socket.close()
        self._child.kill()
        # A large process takes a while to die, and the event loop does not wait for it.
        threading.Thread(target=self._child.wait, name="reap", daemon=True).start()
