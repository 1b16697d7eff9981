"""The server that answers: what it is, one request to it, and what its failures mean for an agent.

Owns the tries and their deadline. How a server is asked and read is the engines'.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from agentloop.capture.recording import Known
from agentloop.capture.refusals import Refusal
from agentloop.capture.settings import UpstreamSettings
from agentloop.engines import probe
from agentloop.engines.http import Http, ServerError
from agentloop.engines.openai import OpenAIEngine
from agentloop.engines.shapes import SHAPES
from agentloop.engines.shapes.reply import Flavour, Shape
from agentloop.engines.types import EngineError, LogprobKind, Request, Sampling

_log = logging.getLogger(__name__)

_AGENTS: Final = frozenset({400, 404, 413, 422})
"""Statuses of a server that are about what the agent asked: it is told them as they are."""

_QUESTION: Final = {"role": "user", "content": "What is 2+2?"}


class Upstream:
    """One server. Safe for many coroutines of one event loop."""

    def __init__(
        self, settings: UpstreamSettings, *, draw: Callable[[], float] = random.random
    ) -> None:
        """Nothing is asked yet.

        Raises:
            EngineError: the address is none, or the variable of the key is not set.
        """
        self._settings = settings
        self._http = Http(
            settings.url, settings.limits, api_key_env=settings.api_key_env, draw=draw
        )
        self._places = asyncio.Semaphore(settings.limits.connections)
        self._finding = asyncio.Lock()
        self._server: tuple[Shape, str] | None = None
        self._kind: LogprobKind | None = None
        self._kind_known = settings.logprob_kind != "probe"
        if settings.logprob_kind != "probe":
            self._kind = settings.logprob_kind
        self._nonce = secrets.token_hex(3)
        self._tries = itertools.count()

    async def known(self, version: int | None) -> tuple[Known, str]:
        """What its replies are read with, and its model; found out once.

        Raises:
            Refusal: 502 or 504: it does not answer, or is no server whose turns can be captured.
        """
        async with self._in_time("does not say what it is"), self._finding:
            if self._server is None:
                self._server = await self._http.retried(self._find)
            shape, model = self._server
            if not self._kind_known:
                self._kind = await self._find_kind(shape, model)
                self._kind_known = True
        return Known(shape, self._kind, self._settings.vocab_size, version), model

    async def chat(self, shape: Shape, body: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The JSON object that a chat request is answered with, tried again as the limits allow.

        `name` is the request's in the server's log; each try has one of its own.

        Raises:
            Refusal: as the server says where the request is wrong, else 502 or 504.
        """

        async def ask() -> Any:
            own = {} if shape.request_id_key is None else {shape.request_id_key: self._name(name)}
            return await self._http.post(shape.path, {**body, **own})

        # Its names, both, are ours: an agent's own would be taken twice where a try is repeated.
        body = {field: value for field, value in body.items() if field not in ("request_id", "rid")}
        async with self._in_time("does not answer"), self._places:
            reply = await self._http.retried(ask)
            if not isinstance(reply, dict):
                raise EngineError(f"{self._http.address} answered with no JSON object")
            return cast("dict[str, Any]", reply)

    async def models(self) -> Any:
        """What it lists. Refusal: 502 or 504."""
        async with self._in_time("does not list its models"):
            status, listed = await self._http.get("/v1/models")
            if status != 200:
                raise ServerError(f"{self._http.address}/v1/models", status, "")
            return listed

    async def close(self) -> None:
        await self._http.close()

    # -- what it is --------------------------------------------------------------------------

    async def _find(self) -> tuple[Shape, str]:
        asked = self._settings.flavour
        known = None if asked == "auto" else cast("Flavour", asked)
        server = await probe.server_of(self._http, flavour=known, model=self._settings.model)
        if server.software == "transformers":
            raise EngineError(
                f"{self._http.address} is transformers serve, which says no token ids: capture "
                "needs vLLM or SGLang"
            )
        return SHAPES["sglang-chat" if server.software == "sglang" else "vllm-chat"], server.model

    async def _find_kind(self, shape: Shape, model: str) -> LogprobKind | None:
        settings = self._settings
        engine = OpenAIEngine(
            settings.url,
            model=model,
            flavour=shape.flavour,
            api_key_env=settings.api_key_env,
            logprob_kind="probe",
            limits=settings.limits,
        )
        request = Request(
            f"capture-{self._nonce}", (), Sampling(max_tokens=8, seed=0), messages=(_QUESTION,)
        )
        try:
            return (await engine.generate(request)).logprob_kind
        except EngineError as error:
            _log.warning("what the log-probs are of cannot be told: %s", error)
            return None
        finally:
            await engine.close()

    def _name(self, name: str) -> str:
        return f"{name}~{self._nonce}{next(self._tries)}"

    # -- its failures ------------------------------------------------------------------------

    def _in_time(self, what: str) -> _Failures:
        return _Failures(self._settings.limits.request_timeout_s, f"the upstream {what}")


class _Failures:
    """A deadline, and what a server's failures are for the agent."""

    def __init__(self, limit_s: float, what: str) -> None:
        self._what = what
        self._limit_s = limit_s
        self._deadline = asyncio.timeout(limit_s)

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await self._deadline.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Refusal(
                504, "upstream_timeout", f"{self._what} within {self._limit_s:g} s"
            ) from None
        if isinstance(error, ServerError):
            raise _refusal_of(error) from error
        if isinstance(error, EngineError):
            _log.warning("upstream: %s", error)
            raise Refusal(502, "upstream_failed", f"{self._what}: {error}") from error


def _refusal_of(error: ServerError) -> Refusal:
    """Told as it is where it is about the request; else it is no business of the agent's."""
    if error.status in _AGENTS:
        return Refusal(error.status, "upstream_refused", _told(error.told), retry=False)
    _log.warning("upstream: %s", error)
    return Refusal(502, "upstream_failed", f"the upstream answered with HTTP {error.status}")


def _told(text: str) -> str:
    """The message of an error in OpenAI's form, or all of it."""
    try:
        said = json.loads(text)
    except ValueError:
        return text
    for part in ("error", "message"):
        if isinstance(said, dict):
            said = cast("dict[str, Any]", said).get(part, cast("dict[str, Any]", said))
    return said if isinstance(said, str) else text
