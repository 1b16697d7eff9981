"""A judge behind HTTP, such as a reward model that is served.

One request judges a batch. Request:
{"items": [{"messages": […], "response": "…", "row": {…}, "uid": "…", "session_id": 0, "index": 0,
"data_source": "…", "finish_reason": "stop"}, …]}
Reply, with one entry for each item, in order, each a number or a map with `score`:
{"rewards": [0.5, {"score": 1.0, "why": "…"}, …]}
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import aiohttp

from agentloop.rewards.rows import to_json
from agentloop.rewards.scores import verdicts
from agentloop.rewards.types import RewardError
from agentloop.trajectory.state import RolloutState

_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK: Final = 64 << 10


class _Unavailable(Exception):
    """It may work if it is tried again."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        """How long the server asks to wait."""


class HttpJudge:
    """A reward that asks a server. For the coroutines of one event loop."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        try_timeout_s: float = 30.0,
        tries: int = 4,
        backoff_s: float = 0.2,
        batch_size: int = 64,
        connections: int = 16,
        columns: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        reply_bytes: int = 8 << 20,
    ) -> None:
        """
        Args:
            url: Where batches are posted.
            timeout_s: Of one batch, all tries and the waits between them together.
            try_timeout_s: Of one try.
            tries: How often a batch is sent at most. Tried again are lost connections, tries that
                overrun, and the statuses that say so; not refusals, and not wrong replies.
            backoff_s: The first wait; it doubles, and a part of it is random.
            batch_size: Trajectories in one request.
            connections: Requests at once.
            columns: The columns of a row that are sent; None: all of them.
            headers: Sent with every request, such as an authorization.
            reply_bytes: A larger reply is refused, unread.
        """
        if tries < 1 or batch_size < 1 or connections < 1:
            raise ValueError("tries, batch_size and connections are at least 1")
        self._url = url
        self._timeout_s = timeout_s
        self._try_timeout_s = try_timeout_s
        self._tries = tries
        self._backoff_s = backoff_s
        self._batch_size = batch_size
        self._connections = connections
        self._columns = None if columns is None else frozenset(columns)
        self._headers = dict(headers or {})
        self._reply_bytes = reply_bytes
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        batches = [
            states[start : start + self._batch_size]
            for start in range(0, len(states), self._batch_size)
        ]
        each = await asyncio.gather(*map(self._judge, batches), return_exceptions=True)
        for said in each:
            if isinstance(said, BaseException):
                raise said
        return [v for said in each if not isinstance(said, BaseException) for v in said]

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    # -- one batch ---------------------------------------------------------------------------

    async def _judge(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        body = to_json({"items": [self._item(state) for state in states]}, "the judge's request")
        failure = "it was not tried"
        wait_s = 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in range(self._tries):
                    if attempt:
                        await asyncio.sleep(wait_s)
                    try:
                        return self._understood(await self._post(body), len(states))
                    except _Unavailable as error:
                        failure = str(error)
                        wait_s = error.wait_s or self._backoff(attempt)
        except TimeoutError:
            raise RewardError(
                f"{self._url} gave no verdict within {self._timeout_s:g} s; last: {failure}"
            ) from None
        raise RewardError(f"{self._url} failed {self._tries} times; last: {failure}")

    async def _post(self, body: bytes) -> bytes:
        try:
            async with self._open().post(self._url, data=body, allow_redirects=False) as reply:
                if reply.status in _RETRIED:
                    raise _Unavailable(
                        f"status {reply.status}", _seconds(reply.headers.get("Retry-After"))
                    )
                if reply.status != 200:
                    said = (await reply.content.read(200)).decode(errors="replace")
                    raise RewardError(f"{self._url} refused: status {reply.status}, {said!r}")
                return await self._read(reply)
        except TimeoutError:
            raise _Unavailable(f"no reply within {self._try_timeout_s:g} s") from None
        except aiohttp.InvalidURL as error:
            raise RewardError(f"{self._url} is no address: {error}") from error
        except aiohttp.ClientError as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error

    async def _read(self, reply: aiohttp.ClientResponse) -> bytes:
        """The body. Compressed ones are not read: they could grow to anything."""
        if reply.headers.get("Content-Encoding", "identity") != "identity":
            raise RewardError(f"{self._url} sent a compressed reply, which was not asked for")
        size = reply.content_length or 0
        parts: list[bytes] = []
        while size <= self._reply_bytes and (part := await reply.content.read(_CHUNK)):
            parts.append(part)
            size = max(size, sum(map(len, parts)))
        if size > self._reply_bytes:
            raise RewardError(f"{self._url} sent more than {self._reply_bytes} bytes")
        return b"".join(parts)

    def _understood(self, text: bytes, count: int) -> list[dict[str, Any]]:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{self._url} sent no JSON: {error}") from error
        if not isinstance(said, dict) or "rewards" not in said:
            raise RewardError(f"{self._url} sent JSON without a list 'rewards'")
        try:
            return verdicts(cast(dict[str, Any], said)["rewards"], count)
        except RewardError as error:
            raise RewardError(f"{self._url}: {error}") from error

    def _item(self, state: RolloutState) -> dict[str, Any]:
        row = state.row
        if self._columns is not None:
            row = {name: value for name, value in row.items() if name in self._columns}
        return {
            "messages": state.messages,
            "response": state.response or "",
            "row": row,
            "uid": state.uid,
            "session_id": state.session_id,
            "index": state.index,
            "data_source": state.data_source,
            "finish_reason": state.finish_reason,
        }

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RewardError(f"the judge at {self._url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                timeout=aiohttp.ClientTimeout(total=self._try_timeout_s),
                headers={
                    "Content-Type": "application/json", "Accept-Encoding": "identity",
                    **self._headers,
                },
                auto_decompress=False,
            )  # fmt: skip
        return self._session

    def _backoff(self, attempt: int) -> float:
        return self._backoff_s * 2**attempt * random.uniform(0.5, 1.0)


def _seconds(text: str | None) -> float | None:
    """What Retry-After says, where it says seconds. The deadline bounds it."""
    return float(text) if text is not None and text.isdecimal() else None
