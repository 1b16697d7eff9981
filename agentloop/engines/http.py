"""JSON over HTTP to one server: a connection pool, bounded replies, typed failures, retries.

Owns the connections and the key. Never knows what a reply means. The key goes out in a header and
nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import aiohttp

from agentloop.engines.retry import BROKEN, LATER, Budget, retry_after_s
from agentloop.engines.types import EngineError

T = TypeVar("T")

_ORDERS = 8
"""Connections beside those of requests."""

_TOLD = 500
"""Letters of a server's error that are repeated."""


class ServerError(EngineError):
    """A server refused, or broke. `status` is its HTTP status, `told` the begin of what it said."""

    def __init__(self, what: str, status: int, told: str, retry_after: float | None = None) -> None:
        super().__init__(f"{what}: HTTP {status}: {told}" if told else f"{what}: HTTP {status}")
        self.status = status
        self.told = told
        self.retry_after_s = retry_after


class ServerUnreachable(EngineError, ConnectionError):
    """No connection, or it broke before the reply was whole."""


class ReplyTooLarge(EngineError):
    """A reply was over the limit; it was not read to its end."""


class EngineTimeout(EngineError, TimeoutError):
    """A request did not end within its deadline."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of everything one engine may take."""

    connections: int = 256
    """Requests that are at the server at once; the others wait."""
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    """Of a request that names no deadline, retries included."""
    admin_timeout_s: float = 60.0
    """Of a question about the server, and of an order to it."""
    abort_grace_s: float = 5.0
    """How long aborted requests may take to come back with what they have."""
    max_reply_bytes: int = 64 << 20
    retry: Budget = field(default_factory=Budget)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """From plain data; `retry` is a map of its own."""
        given = dict(config)
        return cls(retry=Budget(**given.pop("retry", {})), **given)


class Http:
    """One server's endpoints, by path. Safe for many coroutines of one event loop."""

    def __init__(
        self,
        base_url: str,
        limits: Limits,
        *,
        api_key_env: str | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`base_url` may end in `/v1`; `api_key_env` names the variable that holds the key.

        Raises:
            EngineError: the address is none, or the variable is not set.
        """
        address = base_url.rstrip("/").removesuffix("/v1")
        if not address.startswith(("http://", "https://")):
            raise EngineError(f"base_url {base_url!r} does not begin with http:// or https://")
        self.address = address
        self._limits = limits
        self._draw = draw
        self._key = _key(api_key_env)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, authorize: bool = True) -> tuple[int, Any]:
        """The status of a GET, and its JSON if there is any. One try; no status is an error.

        Raises:
            ServerUnreachable, ReplyTooLarge.
        """
        status, raw, _ = await self._exchange("GET", path, None, authorize)
        return status, _json_or_none(raw)

    async def probe(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """The status and the text of one POST. No status is an error.

        Raises:
            ServerUnreachable, ReplyTooLarge.
        """
        status, raw, _ = await self._exchange("POST", path, body, True)
        return status, self._told(raw)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a POST is answered with. One try.

        Raises:
            ServerError, ServerUnreachable, ReplyTooLarge; EngineError if it is no JSON.
        """
        status, raw, headers = await self._exchange("POST", path, body, True)
        if status >= 300:
            after = retry_after_s(headers.get("Retry-After"))
            raise ServerError(f"{self.address}{path}", status, self._told(raw), after)
        try:
            return json.loads(raw, parse_constant=_refuse_constant) if raw.strip() else None
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.address}{path} answered with no JSON: {error}") from error

    async def retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `await ask()` gives, tried again as the budget allows. It has no end of its
        own while the server says 'not now': put a deadline around it.

        Raises:
            EngineError: as `ask` raised it last, or at once where trying again would not help.
        """
        broken = 0
        attempt = 0
        while True:
            try:
                return await ask()
            except ServerError as error:
                if error.status not in LATER | BROKEN:
                    raise
                broken += error.status in BROKEN
                after, last = error.retry_after_s, error
            except ServerUnreachable as error:
                broken += 1
                after, last = None, error
            if broken >= self._limits.retry.tries:
                raise last
            await asyncio.sleep(self._limits.retry.delay_s(attempt, self._draw(), after))
            attempt += 1

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, authorize: bool
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = {"Accept-Encoding": "identity"}
        if self._key and authorize:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._pool().request(
                method, self.address + path, json=body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await self._read(response, path), response.headers
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise ServerUnreachable(f"{self.address}{path}: {self._hidden(what)}") from error

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        limit = self._limits.max_reply_bytes
        if (response.content_length or 0) > limit:
            self._too_large(response, path, response.content_length or 0)
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > limit:
                self._too_large(response, path, size)
            parts.append(part)
        return b"".join(parts)

    def _too_large(self, response: aiohttp.ClientResponse, path: str, size: int) -> NoReturn:
        response.close()  # what is left of it is not read, so the connection cannot serve again
        raise ReplyTooLarge(
            f"{self.address}{path}: a reply of {size} bytes or more, over the limit of "
            f"{self._limits.max_reply_bytes}: raise max_reply_bytes, or ask for less"
        )

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self._limits
            self._session = aiohttp.ClientSession(
                # Some more, so that an order to abort is not behind what it is to end.
                connector=aiohttp.TCPConnector(limit=limits.connections + _ORDERS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _told(self, raw: bytes) -> str:
        return self._hidden(raw[:_TOLD].decode(errors="replace").strip())

    def _hidden(self, text: str) -> str:
        """Without the key, should a server repeat it."""
        return text.replace(self._key, "***") if self._key else text


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EngineError(f"the environment variable {variable} is to hold the key and is not set")
    return key


def _json_or_none(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
