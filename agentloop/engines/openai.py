"""An engine that is a server: vLLM, SGLang or `transformers serve`, over HTTP.

Owns what a request goes through: which endpoint it is sent to, its tries, the completion. What is
sent and what a reply means is `shapes`; what the server is, `probe`; what it is ordered, `admin`;
how requests end early, `calls`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from agentloop.engines import probe
from agentloop.engines.admin import Admin, Unsupported
from agentloop.engines.calls import Call, Calls, Stopped
from agentloop.engines.http import EngineTimeout, Http, Limits, ServerError, ServerUnreachable
from agentloop.engines.shapes import SHAPES, sglang
from agentloop.engines.shapes.checks import RefusedReply, as_map
from agentloop.engines.shapes.reply import (
    Flavour,
    OnDrift,
    Reading,
    Shape,
    Tokens,
    completion_of,
    nothing,
)
from agentloop.engines.types import Completion, EngineError, LogprobKind, Request
from agentloop.engines.weights_folder import save_weights

if TYPE_CHECKING:
    import torch

KindSetting: TypeAlias = LogprobKind | Literal["probe"] | None

AUTO: Final = "auto"


class OpenAIEngine:
    """An `Engine` over one server's HTTP endpoints. Connects when it is first asked."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        flavour: str = AUTO,
        tokenizer: Tokens | None = None,
        version: int = 0,
        api_key_env: str | None = None,
        admin_url: str | None = None,
        pause_server: bool = True,
        logprob_kind: KindSetting = "probe",
        vocab_size: int | None = None,
        on_drift: OnDrift = "refuse",
        weights_dir: str | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Nothing is asked yet.

        `model`: as the server calls it; None takes the first that it lists.
        `flavour`: which endpoint to ask (vllm, vllm-completions, vllm-chat, sglang, sglang-chat,
        transformers); auto takes the best that the server has.
        `tokenizer`: needed where a server gives or takes text only; else it makes the text.
        `version`: of the weights that the server has; used where replies name none.
        `api_key_env`: the environment variable that holds the key.
        `admin_url`: where the endpoints that pause and update are, if not at `base_url`.
        `pause_server`: whether `pause` pauses the server, or only the requests of this engine.
        `logprob_kind`: raw or processed, if it is known; probe finds it out with 2 or 3 tiny
        requests; None leaves it open.
        `on_drift`: what to do where the server's prompt is not what was asked with.
        `weights_dir`: a folder that the server sees too, for `update_weights`.

        Raises:
            EngineError: an argument is wrong, or the key is not set.
        """
        if flavour != AUTO and flavour not in SHAPES:
            raise EngineError(f"no flavour {flavour!r}: {AUTO}, {', '.join(SHAPES)}")
        if not isinstance(limits, Limits):
            limits = Limits.of(limits or {})
        self._limits = limits
        self._flavour: Flavour | None = None if flavour == AUTO else cast("Flavour", flavour)
        self._model = model
        self._tokens = tokenizer
        self._version = version
        self._kind = logprob_kind
        self._vocab_size = vocab_size
        self._on_drift: OnDrift = on_drift
        self._weights_dir = Path(weights_dir) if weights_dir is not None else None
        self._pause_server = pause_server
        self._http = Http(base_url, limits, api_key_env=api_key_env, draw=draw)
        self._admin_http = (
            self._http
            if admin_url is None
            else Http(admin_url, limits, api_key_env=api_key_env, draw=draw)
        )
        self._admin = Admin(self._admin_http, self._http, timeout_s=limits.admin_timeout_s)
        self._server: probe.Server | None = None
        self._probing = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._calls = Calls(limits.abort_grace_s)
        self._places = asyncio.Semaphore(limits.connections)
        self._nonce = secrets.token_hex(3)
        self._asks = itertools.count()
        self._paused = False
        self._server_paused = False
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._version

    # -- a request ---------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        if self._closed:
            raise EngineError(f"the engine of {self._http.address} is closed")
        if self._paused:
            return nothing(request)
        limit_s = request.timeout_s
        if limit_s is None:
            limit_s = self._limits.request_timeout_s
        return await self._calls.run(request, self._answer, limit_s)

    async def _answer(self, call: Call) -> Completion:
        server = await self._known(call)
        shape = self._shape_for(server, call.request)
        reply = await self._http.retried(lambda: self._ask(call, server, shape))
        kind = cast("LogprobKind | None", None if self._kind == "probe" else self._kind)
        if server.software == "sglang":
            kind = sglang.logprob_kind(kind, call.request.sampling)
        completion = self._completion(call, shape, reply, kind)
        if completion.versions and completion.extra.get("versions_from") != "engine":
            said = completion.versions[-1]
            # Lower only if nobody has said anything since: a server that was restarted.
            self._version = said if call.version == self._version else max(said, self._version)
        return completion

    async def _ask(self, call: Call, server: probe.Server, shape: Shape) -> Any:
        """One try. Waiting for a connection is no part of being at the server."""
        async with self._places:
            if call.stopping:
                raise Stopped
            return await self._send(call, server, shape)

    async def _send(self, call: Call, server: probe.Server, shape: Shape) -> Any:
        request = call.request
        body = shape.body(request, server.model)
        # A server takes an id once, and may still be at a try whose connection broke.
        name = f"{request.request_id}~{self._nonce}{next(self._asks)}"
        if shape.request_id_key is not None:
            body[shape.request_id_key] = name
        if shape.flavour == "vllm":
            # It looks for stop strings only where it makes text, which not every server can.
            text = self._tokens is None or bool(request.sampling.stop)
            body["output_mode"] = "text" if text else "tokens"
        call.server_ids = shape.server_ids(name)
        call.version = self._version
        try:
            return await self._http.post(shape.path, body)
        except (ServerError, ServerUnreachable) as error:
            if call.stopping:
                raise Stopped from error
            raise
        finally:
            call.server_ids = []

    def _completion(
        self, call: Call, shape: Shape, reply: Any, kind: LogprobKind | None
    ) -> Completion:
        reading = Reading(
            version=call.version,
            tokens=self._tokens,
            vocab_size=self._vocab_size,
            on_drift=self._on_drift,
            logprob_kind=kind,
            max_experts_bytes=self._limits.max_reply_bytes,
        )
        return completion_of(shape.read(as_map(reply, "reply")), call.request, shape, reading)

    def _shape_for(self, server: probe.Server, request: Request) -> Shape:
        """The endpoint for this request.

        Raises:
            EngineError: the request has not what the server takes.
        """
        shape = SHAPES[server.flavour]
        if shape.flavour == "vllm-chat" and request.token_ids and not self._is_prompt(request):
            return SHAPES["vllm-completions"]  # a continuation: its template would end the turn
        if shape.flavour == "sglang-chat" and not (request.token_ids or request.messages):
            raise EngineError(f"request {request.request_id} has no token ids and no messages")
        if shape.takes_ids and shape.flavour != "sglang-chat" and not request.token_ids:
            raise EngineError(
                f"request {request.request_id} has no token ids, and {shape.path} takes them"
            )
        return shape

    def _is_prompt(self, request: Request) -> bool:
        """Whether the messages say all that the token ids do."""
        if not request.messages or self._tokens is None:
            return bool(request.messages)
        prompt = self._tokens.prompt(request.messages, request.tools)
        return prompt == list(request.token_ids)

    async def _known(self, call: Call) -> probe.Server:
        """What the server is, asked once."""
        asks_kind = self._kind == "probe" and call.request.sampling.logprobs
        if self._server is not None and not asks_kind:
            return self._server
        async with self._probing:
            if self._server is None:
                self._server = await self._http.retried(
                    lambda: probe.server_of(self._http, flavour=self._flavour, model=self._model)
                )
            server = self._server
            assert server is not None
            if self._kind == "probe" and asks_kind:
                self._kind = await self._find_kind(server, call.request)
            return server

    async def _find_kind(self, server: probe.Server, request: Request) -> LogprobKind | None:
        if server.software == "transformers":
            return None

        async def plain(request: Request) -> Completion:
            tiny = Call.of(request)
            shape = self._shape_for(server, request)
            reply = await self._http.retried(lambda: self._ask(tiny, server, shape))
            return self._completion(tiny, shape, reply, None)

        try:
            return await probe.logprob_kind_of(
                plain, replace(request, request_id=f"probe-{request.request_id}")
            )
        except RefusedReply:
            return None  # the request's own reply will say what is wrong

    # -- ending early ------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        await self._calls.stop(self._calls.named(request_id), self._abort_at_server)

    async def pause(self) -> None:
        self._paused = True
        async with self._ordering:
            await self._calls.stop(self._calls.all(), self._pause_at_server)

    async def resume(self) -> None:
        """Take requests again.

        Raises:
            EngineError: the server was paused and does not go on; the engine stays paused.
        """
        async with self._ordering:
            if self._server_paused and self._server is not None:
                try:
                    await self._admin.resume(self._server.software)
                except TimeoutError as error:
                    raise EngineTimeout(f"{self._admin_http.address} does not resume") from error
                self._server_paused = False
            self._paused = False

    async def _abort_at_server(self, calls: list[Call]) -> bool:
        names = [name for call in calls for name in call.server_ids]
        if not names or self._server is None:
            return False
        return await self._admin.abort(self._server.software, names)

    async def _pause_at_server(self, calls: list[Call]) -> bool:
        if self._server is None:
            return False
        if self._pause_server:
            # Even if the answer does not come, it may be paused, and is to go on at `resume`.
            self._server_paused = True
            if await self._admin.pause(self._server.software):
                return True
            self._server_paused = False
        return await self._abort_at_server(calls)

    async def close(self) -> None:
        """End what is under way with nothing, and close the connections."""
        self._closed = True
        await self._calls.drop(self._calls.all())
        await self._http.close()
        await self._admin_http.close()

    # -- weights -----------------------------------------------------------------------------

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Generate with these weights from here on, written to `weights_dir` for the server.

        Raises:
            Unsupported: the server takes no weights from a folder, or there is no `weights_dir`.
            EngineError: the server did not take them.
        """
        server = await self._asked_server()
        if server.software != "sglang" or self._weights_dir is None:
            raise Unsupported(
                f"tensors cannot be sent to {server.software} over HTTP: transfer them its own way "
                "and say so with `set_version`; SGLang takes them through a `weights_dir`"
            )
        folder = await asyncio.to_thread(save_weights, weights, self._weights_dir, version)
        await self.load_weights(folder, version)

    async def load_weights(self, folder: str | Path, version: int) -> None:
        """Generate with the weights of a folder that the server can read.

        Raises:
            Unsupported: the server takes no weights from a folder.
            EngineError: it did not take these.
        """
        server = await self._asked_server()
        await self._admin.load(server.software, Path(folder), version)
        await self._admin.tell_version(server.software, version)
        self._version = version

    async def set_version(self, version: int) -> bool:
        """The server's weights were replaced by somebody else: tokens from here on are of this
        version. Says whether the server was told, so that its replies say so too."""
        server = await self._asked_server()
        told = await self._admin.tell_version(server.software, version)
        self._version = version
        return told

    async def _asked_server(self) -> probe.Server:
        async with asyncio.timeout(self._limits.admin_timeout_s), self._probing:
            if self._server is None:
                self._server = await probe.server_of(
                    self._http, flavour=self._flavour, model=self._model
                )
            return self._server
