"""A rollout server with real sockets that speaks each shape, and misbehaves when told to.

Its model is a rule: the scores of the next token follow from the tokens so far, so the same prompt
and seed give the same tokens, and log-probs are those of a real distribution.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from aiohttp import web

VOCAB = 90
EOS = 1
_OPEN, _AFTER_ROLE, _CLOSE = 2, 3, 4

TRANSFORMERS_FIELDS = frozenset(
    "model messages generation_config stop stream seed tools temperature top_p max_tokens "
    "max_completion_tokens frequency_penalty logit_bias chat_template_kwargs logprobs".split()
)


class Letters:
    """A tokenizer with one letter per token; the end token has none."""

    eos_ids = (EOS,)

    def encode(self, text: str, /) -> list[int]:
        return [ord(letter) - 33 for letter in text.replace(" ", "_") if letter != "\n"]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(chr(33 + token) for token in token_ids if token != EOS)

    def prompt(self, messages: Sequence[Any], tools: Sequence[Any] = (), /) -> list[int]:
        ids = self.encode(json.dumps(list(tools))) if tools else []
        for message in messages:
            role, content = self.encode(message["role"]), self.encode(message["content"] or "")
            ids += [_OPEN, *role, _AFTER_ROLE, *content, _CLOSE]
        return [*ids, _OPEN, *self.encode("assistant"), _AFTER_ROLE]


LETTERS = Letters()


@dataclass(slots=True)
class Asked:
    """What a request asks for, whatever the shape."""

    ids: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    stop: list[str]
    name: str
    logprobs: bool
    body: dict[str, Any]


@dataclass(slots=True)
class Made:
    """What the model made of it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "length"

    @property
    def text(self) -> str:
        return LETTERS.decode(self.ids)


class RolloutServer:
    """`async with RolloutServer("vllm") as server:`; attributes are switches, at any time."""

    def __init__(self, software: str, **switches: Any) -> None:
        self.software = software
        self.key: str | None = None
        self.admin_key = False
        """Whether the key guards them, too."""
        self.admin = True
        """Whether the endpoints that pause and update are there."""
        self.scale_out = True
        """vLLM: whether tokens in, tokens out is there."""
        self.raw_logprobs = software == "vllm"
        self.top_k_renormalizes = software == "vllm"
        self.says_ids = True
        self.says_versions = True
        self.spans: list[tuple[object, int]] | None = None
        """Labels with token counts from the start of a completion; None: one span, `version`."""
        self.version: object = "0"
        self.experts_width = 0
        self.prompt_shift: list[int] = []
        """Tokens that its template puts in front, which ours does not."""
        self.hold_after: int | None = None
        """Tokens after which generation waits for `gate` or an abort."""
        self.gate = asyncio.Event()
        self.ignores_abort = False
        self.rejects_weights = False
        # One entry for each of the next generation requests:
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.cuts = 0
        self.hangs = 0
        # For every generation request while it is set:
        self.edit: Callable[[dict[str, Any]], None] | None = None
        self.raw_body: bytes | None = None
        self.oversized_bytes = 0
        self.claimed_bytes = 0
        """A reply says that it is as long as this, and nothing of it comes."""

        self.asked: list[tuple[str, dict[str, Any]]] = []
        """(path, body) of every POST."""
        self.keys: list[str | None] = []
        self.paused = False
        self.running: dict[str, asyncio.Event] = {}
        """The abort events of requests under way, by the server's own name for them."""
        self.held: set[str] = set()
        """Those of them that stand still after `hold_after` tokens."""
        self.left = 0
        """Requests whose client went away before the answer."""
        self.changed = asyncio.Condition()
        for name, value in switches.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self._resumed = asyncio.Event()
        self._resumed.set()

    # -- life --------------------------------------------------------------------------------

    async def __aenter__(self) -> RolloutServer:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # Handlers are cancelled when their client goes away, as servers abort then.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port: int = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        """Wait until something has happened here."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    # -- routes ------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.keys.append(request.headers.get("Authorization"))
        inference = path.startswith(("/v1", "/inference", "/generate"))
        guarded = self.key and (inference or self.admin_key)
        if guarded and self.keys[-1] != f"Bearer {self.key}":
            return web.json_response({"error": f"wrong key {self.keys[-1]}"}, status=401)
        handler = self._handler(path)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        method, answer = handler
        if request.method != method:
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        body: dict[str, Any] = await request.json() if method == "POST" else {}
        if method == "POST":
            self.asked.append((request.path_qs, body))
            await self._note()
        return await answer(request, body)

    def _handler(self, path: str) -> tuple[str, Callable[..., Any]] | None:
        routes: dict[str, tuple[str, Callable[..., Any]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._generation),
        }
        if self.software == "vllm":
            routes |= {
                "/version": ("GET", self._version_of),
                "/v1/completions": ("POST", self._generation),
            }
            if self.scale_out:
                routes |= {
                    "/inference/v1/generate": ("POST", self._generation),
                    "/inference/v1/abort_requests": ("POST", self._abort),
                }
            if self.admin:
                routes |= {
                    "/pause": ("POST", self._pause),
                    "/resume": ("POST", self._resume),
                    "/abort_requests": ("POST", self._abort),
                    "/update_weight_version": ("POST", self._set_version),
                }
        if self.software == "sglang":
            routes |= {
                "/server_info": ("GET", self._version_of),
                "/generate": ("POST", self._generation),
            }
            if self.admin:
                routes |= {
                    "/pause_generation": ("POST", self._pause),
                    "/continue_generation": ("POST", self._resume),
                    "/abort_request": ("POST", self._abort),
                    "/update_weight_version": ("POST", self._set_version),
                    "/update_weights_from_disk": ("POST", self._load),
                }
        return routes.get(path)

    async def _models(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        owner = {"vllm": "vllm", "sglang": "sglang"}.get(self.software, "")
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": owner}]})

    async def _version_of(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        version = {"vllm": "0.33.0", "sglang": "0.5.23"}[self.software]
        return web.json_response({"version": version})

    async def _pause(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = True
        self._resumed.clear()
        self._end(list(self.running))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = False
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def _abort(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.software == "vllm" and "request_ids" not in body:
            return web.json_response({"error": "request_ids is missing"}, status=400)
        self._end(body["request_ids"] if self.software == "vllm" else [body["rid"]])
        return web.Response()

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.running and not self.ignores_abort:
                self.running[name].set()

    async def _set_version(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.version = body["new_version"]
        return web.json_response({"success": True})

    async def _load(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.rejects_weights:
            return web.json_response({"success": False, "message": "no such architecture"})
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    # -- generation --------------------------------------------------------------------------

    async def _generation(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.refusals:
            status, headers = self.refusals.pop(0)
            return web.json_response({"error": "not now"}, status=status, headers=headers)
        if not body:
            return web.json_response({"error": "empty"}, status=400)
        if self.software == "transformers":
            unknown = set(body) - TRANSFORMERS_FIELDS
            if unknown:
                told = f"Unexpected fields in the request: {unknown}"
                return web.json_response({"detail": told}, status=422)
        if self.paused and self.software == "vllm":
            return web.json_response({"error": "paused"}, status=503)
        await self._resumed.wait()
        if self.hangs:
            self.hangs -= 1
            await self._forever()
        asked = self._asked(request.path, body)
        if asked.name in self.running:
            return web.json_response({"error": f"{asked.name} is running"}, status=400)
        ended = self.running[asked.name] = asyncio.Event()
        await self._note()
        try:
            made = await self._run(asked, ended)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            del self.running[asked.name]
            self.held.discard(asked.name)
            await self._note()
        reply = self._reply(request.path, asked, made)
        if self.edit is not None:
            self.edit(reply)
        return await self._send(request, json.dumps(reply).encode())

    async def _forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left += 1
            await self._note()
            raise

    async def _send(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        if self.raw_body is not None:
            raw = self.raw_body
        if self.oversized_bytes:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)  # chunked: its length is not told
            for _ in range(self.oversized_bytes >> 16):
                await response.write(b" " * (1 << 16))
            return response
        if self.claimed_bytes:
            headers = {"Content-Length": str(self.claimed_bytes)}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await self._forever()
        if self.cuts:
            self.cuts -= 1
            response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
            await response.prepare(request)
            await response.write(raw[: len(raw) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=raw, content_type="application/json")

    def _asked(self, path: str, body: dict[str, Any]) -> Asked:
        config = body.get("sampling_params", body)
        if "generation_config" in body:
            config = json.loads(body["generation_config"])
        limit = (
            config.get("max_completion_tokens")
            or config.get("max_tokens")
            or config.get("max_new_tokens")
        )
        ids = body.get("token_ids") or body.get("input_ids") or body.get("prompt")
        if ids is None:
            ids = [*self.prompt_shift, *LETTERS.prompt(body["messages"], body.get("tools") or ())]
        prefix = {
            "/inference/v1/generate": "generate-tokens-",
            "/v1/completions": "cmpl-",
            "/v1/chat/completions": "chatcmpl-",
        }
        name = str(body.get("request_id") or body.get("rid") or f"r{len(self.asked)}")
        if self.software == "vllm":
            name = prefix[path] + name + ("-0" if path == "/v1/completions" else "")
        if not config.get("do_sample", True):
            config = {**config, "temperature": 0.0}
        logprobs = body.get("return_logprob", config.get("logprobs"))
        return Asked(
            ids=list(ids),
            max_tokens=limit,
            temperature=config["temperature"],
            top_k=max(0, config.get("top_k", 0)),
            seed=config.get("seed", config.get("sampling_seed", body.get("seed", 7))),
            stop=config.get("stop") or body.get("stop") or [],
            name=name,
            logprobs=logprobs is not None and logprobs is not False,  # 0 asks for them
            body=body,
        )

    async def _run(self, asked: Asked, ended: asyncio.Event) -> Made:
        made = Made()
        while len(made.ids) < asked.max_tokens:
            if len(made.ids) == self.hold_after and not self.gate.is_set():
                self.held.add(asked.name)
                await self._note()
                waits = [asyncio.ensure_future(e.wait()) for e in (ended, self.gate)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            if ended.is_set():
                made.finish = "abort"
                return made
            token, logprob = self._next([*asked.ids, *made.ids], asked)
            made.ids.append(token)
            made.logprobs.append(logprob)
            if token == EOS or any(stop in made.text for stop in asked.stop):
                made.finish = "stop"
                return made
        return made

    def _next(self, prefix: list[int], asked: Asked) -> tuple[int, float]:
        state = zlib.crc32(np.asarray(prefix, "<i4").tobytes())
        scores = np.random.default_rng(state).normal(0.0, 2.0, VOCAB)
        warm = scores / (asked.temperature or 1.0)
        draws = warm.copy()
        if asked.top_k:
            draws[draws < np.sort(draws)[-asked.top_k]] = -np.inf
        chances = np.exp(_log_softmax(draws))
        if asked.temperature == 0:
            token = int(np.argmax(scores))
        else:
            token = int(np.random.default_rng([state, asked.seed]).choice(VOCAB, p=chances))
        told = scores if self.raw_logprobs else draws if self.top_k_renormalizes else warm
        return token, float(_log_softmax(told)[token])

    # -- replies -----------------------------------------------------------------------------

    def _spans(self, count: int) -> list[dict[str, Any]]:
        if not count:
            return []
        spans, start = [], 0
        for label, size in self.spans or [(self.version, count)]:
            end = min(count, start + size)
            if end > start:
                spans.append({"version": label, "start": start, "end": end})
            start = end
        return spans

    def _reply(self, path: str, asked: Asked, made: Made) -> dict[str, Any]:
        if self.software == "transformers":
            return self._text_reply(asked, made)
        if path == "/generate":
            return self._sglang_reply(asked, made)
        if self.software == "sglang":
            return self._sglang_chat_reply(asked, made)
        return self._vllm_reply(path, asked, made)

    def _usage(self, asked: Asked, made: Made) -> dict[str, int]:
        return {"prompt_tokens": len(asked.ids), "completion_tokens": len(made.ids)}

    def _vllm_reply(self, path: str, asked: Asked, made: Made) -> dict[str, Any]:
        body = asked.body
        choice: dict[str, Any] = {"index": 0, "finish_reason": made.finish, "stop_reason": None}
        reply: dict[str, Any] = {"id": asked.name, "choices": [choice]}
        names = [LETTERS.decode([token]) for token in made.ids]
        if body.get("return_tokens_as_token_ids"):
            names = [f"token_id:{token}" for token in made.ids]
        content: list[dict[str, Any]] = [
            {"token": name, "logprob": p, "bytes": [], "top_logprobs": []}
            for name, p in zip(names, made.logprobs, strict=True)
        ]
        if path == "/inference/v1/generate":
            reply["output_mode"] = body["output_mode"]
            if body["output_mode"] == "text":
                choice["text"] = made.text
            else:
                content = [
                    {"token_id": token, "logprob": p, "rank": 1, "top_logprobs": []}
                    for token, p in zip(made.ids, made.logprobs, strict=True)
                ]
        elif path == "/v1/completions":
            choice["text"] = made.text
            reply["usage"] = self._usage(asked, made)
        else:
            choice["message"] = {
                "role": "assistant",
                "content": made.text or None,
                "tool_calls": [],
            }
            reply["usage"] = self._usage(asked, made)
        choice["logprobs"] = None
        if asked.logprobs and path == "/v1/completions":
            choice["logprobs"] = {"tokens": names, "token_logprobs": made.logprobs}
        elif asked.logprobs:
            choice["logprobs"] = {"content": content}
        if self.says_ids:
            choice["token_ids"] = made.ids
            (choice if path == "/v1/completions" else reply)["prompt_token_ids"] = asked.ids
        if self.says_versions:
            choice["weight_versions"] = self._spans(len(made.ids))
        if self.experts_width:
            choice["routed_experts"] = as_npy(self._experts(asked, made))
        return reply

    def _experts(self, asked: Asked, made: Made) -> np.ndarray[Any, Any]:
        rows = len(asked.ids) + len(made.ids) - 1
        table = np.arange(rows * self.experts_width) % 8
        return table.reshape(rows, self.experts_width // 2, 2).astype(np.uint8)

    def _sglang_meta(self, asked: Asked, made: Made) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": asked.name}
        if asked.logprobs:
            meta["output_token_logprobs"] = [
                [p, token, None] for p, token in zip(made.logprobs, made.ids, strict=True)
            ]
        if self.experts_width:
            raw = self._experts(asked, made).astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(raw).decode()
        return meta

    def _sglang_versions(self, made: Made) -> dict[str, Any]:
        if not self.says_versions:
            return {}
        spans = {} if self.spans is None else {"weight_versions": self._spans(len(made.ids))}
        return {"weight_version": self.version, **spans}

    def _sglang_reply(self, asked: Asked, made: Made) -> dict[str, Any]:
        return {
            "text": made.text,
            "output_ids": made.ids,
            "meta_info": {
                **self._sglang_meta(asked, made),
                **self._sglang_versions(made),
                "finish_reason": {"type": made.finish},
                "prompt_tokens": len(asked.ids),
                "completion_tokens": len(made.ids),
            },
        }

    def _sglang_chat_reply(self, asked: Asked, made: Made) -> dict[str, Any]:
        return {
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": made.text,
                        "reasoning_content": None,
                    },
                    "prompt_token_ids": asked.ids,
                    "response_token_ids": made.ids,
                    "logprobs": {"content": [{"logprob": p, "token": ""} for p in made.logprobs]},
                    "meta_info": self._sglang_meta(asked, made),
                    "finish_reason": made.finish,
                    "matched_stop": None,
                }
            ],
            "metadata": self._sglang_versions(made),
            "usage": self._usage(asked, made),
        }

    def _text_reply(self, asked: Asked, made: Made) -> dict[str, Any]:
        message = {"role": "assistant", "content": made.text, "tool_calls": None}
        choice = {"index": 0, "message": message, "finish_reason": made.finish}
        return {"choices": [choice], "usage": self._usage(asked, made)}


def _log_softmax(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())


def as_npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
