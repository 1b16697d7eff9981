"""Orders to a server: pause, go on, abort, take these weights, call them by this version.

Owns which server has which order. An order that a server does not have, or does not take from us,
is answered with False; a server that should take it and fails is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agentloop.engines.http import Http, ServerError
from agentloop.engines.probe import Software
from agentloop.engines.types import EngineError

_NOT_OURS = frozenset({401, 403, 404, 405, 501})


class Unsupported(EngineError):
    """The server has no such order."""


class Admin:
    """The administrative endpoints of one server."""

    def __init__(self, http: Http, inference: Http, *, timeout_s: float) -> None:
        """`inference` is where requests go; `http` may be another, private port."""
        self._http = http
        self._inference = inference
        self._timeout_s = timeout_s

    async def pause(self, software: Software) -> bool:
        """End all requests at the server with what they have, and take no new ones."""
        if software == "vllm":
            return await self._order("/pause?mode=abort", {})
        return software == "sglang" and await self._order("/pause_generation", {"mode": "abort"})

    async def resume(self, software: Software) -> bool:
        """Undo `pause`."""
        path = "/resume" if software == "vllm" else "/continue_generation"
        return await self._order(path, {}, again=True)

    async def abort(self, software: Software, ids: Sequence[str]) -> bool:
        """End these requests with what they have; ids that are not under way are ignored."""
        if software == "vllm":
            body = {"request_ids": list(ids)}
            inference = await self._order("/inference/v1/abort_requests", body, at=self._inference)
            return inference or await self._order("/abort_requests", body)
        if software == "sglang":
            orders = [self._order("/abort_request", {"rid": name}) for name in ids]
            return all(await asyncio.gather(*orders))
        return False

    async def load(self, software: Software, path: Path, version: int) -> None:
        """Replace the weights by those of a folder that the server can read.

        Raises:
            Unsupported: the server has no documented way to do it.
            EngineError: it failed; the server says why.
        """
        if software != "sglang":
            raise Unsupported(
                f"{software} loads no weights from a folder over HTTP: transfer them its own way "
                "and say so with `set_version`, or use SGLang or HFEngine"
            )
        said = await self._answer(
            "/update_weights_from_disk",
            {"model_path": str(path), "weight_version": str(version), "flush_cache": True},
        )
        told = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if told.get("success") is not True:
            raise EngineError(
                f"{self._http.address} did not load {path}: {str(told or None)[:300]}"
            )

    async def tell_version(self, software: Software, version: int) -> bool:
        """Tokens from here on are labelled with this version."""
        if software == "transformers":
            return False
        return await self._order("/update_weight_version", {"new_version": str(version)})

    async def _order(
        self, path: str, body: dict[str, Any], *, at: Http | None = None, again: bool = False
    ) -> bool:
        try:
            await self._answer(path, body, at=at, again=again)
        except ServerError as error:
            if error.status in _NOT_OURS:
                return False
            raise
        return True

    async def _answer(
        self, path: str, body: dict[str, Any], *, at: Http | None = None, again: bool = False
    ) -> Any:
        http = at or self._http
        async with asyncio.timeout(self._timeout_s):
            if again:
                return await http.retried(lambda: http.post(path, body))
            return await http.post(path, body)
