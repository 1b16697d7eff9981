"""The capture over HTTP: routes, who may use them, and what their answers look like.

Owns the contract below. What a request does is service.py's.

    POST   /runs/{run}/v1/chat/completions   run key    200 as the upstream answers, or a stream
    POST   /v1/chat/completions              run key    the same; the run by `x-run-id`, or the key
    GET    /runs/{run}/v1/models             run key    200 as the upstream answers
    POST   /v1/runs                          server key 201 {"run_id", "base_url", "api_key"}
    GET    /v1/runs/{run}                    run key    200 its turns and branches
    POST   /v1/runs/{run}/reward             run key    200; with "end": true as /end
    POST   /v1/runs/{run}/end                run key    200 its trajectories; again, the same
    DELETE /v1/runs/{run}                    run key    204 nothing is published
    POST   /v1/groups                        server key 201 {"uid", "n"} begins a group: its attempt
    POST   /v1/groups/end                    server key 200 {"attempt"}: finished, or failure
    POST   /v1/steps                         server key 200 how far the trainer is
    GET    /v1/stats                         server key 200 counts
    GET    /health                           nobody     200

Where it says run key the server's key does too. Errors are in the form of OpenAI's, with a word for
programs in `error.code`:

    400  invalid_request         the body is wrong; nothing was done
    401  unauthenticated         no key, or not the one of this run; says not whether there is a run
    403  forbidden               the run's key may not do this here
    404  no_such_run             it never was, was dropped, or ended too long ago
    408  body_too_slow           the body did not come in time
    409  run_ended               the run takes no more turns, or has another reward
         run_ending              another end of it is under way; come again
         no_reward               it cannot end without one, but as abort or error
         identity_in_use         another run has this uid and session
         idempotency_key_reused  the key was another request's
         attempt_closed          its group was ended or begun anew: nothing was published
         already_written         there are rows of its keys that are another run's
         plane_refused           the plane refuses the rows; the run is kept
    413  too_large               the body is over the limit; nothing was done
         run_full                the run has as many turns or bytes as it may: end it
    429  too_many_runs, too_many_requests, too_many_bytes   come again after `Retry-After`
         too_stale               what is served, or the run, is more than max_lag steps behind
    502  upstream_failed         the upstream cannot be had, or broke; nothing was recorded
    503  plane_unavailable       the run is kept: end it again; a group was not begun or ended
    504  upstream_timeout        the upstream did not answer in time; nothing was recorded
    507  journal_failed          the disk is full: what was asked for did not happen

What an upstream refuses with 400, 404, 413 or 422 is told as it is (`upstream_refused`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final, TypeAlias, cast

from aiohttp import web

from agentloop.capture import keys
from agentloop.capture.answering import chunks_of
from agentloop.capture.plain import what_is_not_plain
from agentloop.capture.refusals import Refusal, invalid
from agentloop.capture.run import Run
from agentloop.capture.service import Capture
from agentloop.capture.settings import CaptureSettings
from agentloop.capture.turns import Answered

_log = logging.getLogger(__name__)

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_S: Final = 60.0
"""How long a request's body may take to come."""

_STOP_S: Final = 5.0
"""How long requests under way may go on when the server stops."""

_LOOK_S: Final = 30.0
"""The longest time between two looks for runs that are idle."""


class CaptureServer:
    """A capture that listens on one address."""

    def __init__(
        self,
        capture: Capture,
        settings: CaptureSettings,
        *,
        admin_key: str | None = None,
        insecure_allow_anyone: bool = False,
    ) -> None:
        """`admin_key` is the server's key; without one nobody is asked for any key, and only this
        machine may connect unless `insecure_allow_anyone` says otherwise."""
        self._capture = capture
        self._settings = settings
        self._admin = None if admin_key is None else keys.hashed(admin_key)
        self._insecure = insecure_allow_anyone
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listen; the URL, with the port that it came to.

        Raises:
            ValueError: without a key only an address of this machine is listened on.
            OSError: the address cannot be had.
        """
        if self._admin is None and not self._insecure and not _is_loopback(host):
            raise ValueError(
                f"{host} is open to others, and there is no key: set one, listen on 127.0.0.1, or "
                "say insecure_allow_anyone, with which everybody who reaches it may write rows"
            )
        app = web.Application(
            client_max_size=self._settings.limits.max_body_bytes, middlewares=[self._refusals]
        )
        app.router.add_routes(self._routes())
        self._runner = web.AppRunner(
            app,
            # A turn that nobody waits for any more is ended at the upstream as well.
            handler_cancellation=True,
            shutdown_timeout=_STOP_S,
            access_log=None,  # it would hold the runs' names, and keys of clients that err
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        bound = self._runner.addresses[0]
        name = f"[{bound[0]}]" if ":" in str(bound[0]) else bound[0]
        return f"http://{name}:{bound[1]}"

    async def stop(self) -> None:
        """Take no more requests, end those that do not end by themselves, and let go of all."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._runner is not None:
            await self._runner.cleanup()
        await self._capture.close()

    async def _sweep(self) -> None:
        pause_s = min(self._settings.limits.idle_s / 4, _LOOK_S)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._capture.expire()
            except Exception:
                _log.exception("looking for idle runs failed; it is tried again")

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/runs/{run_id}/v1/chat/completions", self._chat),
            web.post("/v1/chat/completions", self._chat),
            web.get("/runs/{run_id}/v1/models", self._models),
            web.get("/v1/models", self._models),
            web.post("/v1/runs", self._start),
            web.get("/v1/runs/{run_id}", self._show),
            web.delete("/v1/runs/{run_id}", self._drop),
            web.post("/v1/runs/{run_id}/reward", self._reward),
            web.post("/v1/runs/{run_id}/end", self._end),
            web.post("/v1/groups", self._begin_group),
            web.post("/v1/groups/end", self._end_group),
            web.post("/v1/steps", self._steps),
            web.get("/v1/stats", self._stats),
            web.get("/health", self._health),
        ]

    # -- who asks ----------------------------------------------------------------------------

    def _is_admin(self, request: web.Request) -> bool:
        shown = keys.bearer(request.headers.get("Authorization"))
        return keys.is_key(shown, self._admin) or self._admin is None

    def _check_admin(self, request: web.Request) -> None:
        if not self._is_admin(request):
            raise _unauthenticated()

    def _run_of(self, request: web.Request, *, judges: bool = False) -> Run:
        """The run that a request is about.

        Raises:
            Refusal: 401, 403, 404; 400 if it names none.
        """
        shown = keys.bearer(request.headers.get("Authorization"))
        named = (
            request.match_info.get("run_id")
            or request.headers.get("x-run-id")
            or keys.run_of(shown)
        )
        run = None if named is None else self._capture.runs.find(named)
        is_agent = keys.is_key(shown, None if run is None else run.key)
        if not self._is_admin(request):
            if not is_agent:
                raise _unauthenticated()
            if judges and not self._settings.agents_may_reward:
                raise Refusal(403, "forbidden", "only the server's key may do this", retry=False)
        if named is None:
            raise invalid("name a run: by the path /runs/{run}/v1, `x-run-id`, or its key")
        if run is None:
            raise Refusal(404, "no_such_run", f"there is no run {named[:40]!r}", retry=False)
        self._capture.touch(run)
        return run

    # -- handlers ----------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request)
        with self._capture.turns.place():  # before memory is taken for the body
            raw = await _body(request)
            key = request.headers.get("Idempotency-Key")
            answered = await self._capture.turns.chat(run, raw, key)
            try:
                return await _send(request, run, answered)
            except (ConnectionError, asyncio.CancelledError):
                # Nobody has seen it, so it must not be trained on as what the agent went on with.
                if answered.number is not None:
                    self._capture.runs.undo(run, answered.number)
                raise

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._run_of(request)
        return web.json_response(await self._capture.models())

    async def _start(self, request: web.Request) -> web.StreamResponse:
        self._check_admin(request)
        run, key = self._capture.start(await _object(request))
        told = {
            "run_id": run.run_id,
            "base_url": f"{request.url.origin()}/runs/{run.run_id}/v1",
            "api_key": key,
        }
        return web.json_response(told, status=201)

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._run_of(request).shown())

    async def _drop(self, request: web.Request) -> web.StreamResponse:
        self._capture.drop(self._run_of(request, judges=True))
        return web.Response(status=204)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request, judges=True)
        body = await _object(request)
        if body.get("end") is True:
            return web.json_response(await self._capture.end(run, body))
        self._capture.judge(run, body)
        return web.json_response({"run_id": run.run_id, "reward": run.verdict.reward})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request, judges=True)
        return web.json_response(await self._capture.end(run, await _object(request)))

    async def _begin_group(self, request: web.Request) -> web.StreamResponse:
        self._check_admin(request)
        return web.json_response(
            await self._capture.begin_group(await _object(request)), status=201
        )

    async def _end_group(self, request: web.Request) -> web.StreamResponse:
        self._check_admin(request)
        return web.json_response(await self._capture.end_group(await _object(request)))

    async def _steps(self, request: web.Request) -> web.StreamResponse:
        self._check_admin(request)
        self._capture.steps.tell(await _object(request))
        return web.json_response(asdict(self._capture.steps))

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        self._check_admin(request)
        runs = self._capture.runs
        return web.json_response({**runs.shown(), "counts": asdict(runs.counts)})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    # -- errors ------------------------------------------------------------------------------

    @web.middleware
    async def _refusals(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            refusal = error
        except web.HTTPException as error:
            code = {404: "no_such_path", 405: "no_such_method", 413: "too_large"}
            refusal = Refusal(
                error.status, code.get(error.status, "http"),
                f"{request.method} {request.path[:80]}: {error.reason}", retry=False,
            )  # fmt: skip
        except ConnectionError:
            raise  # whoever asked is gone
        except OSError as error:
            _log.error("the journal: %s", error)
            refusal = Refusal(507, "journal_failed", "it could not be written down")
        except Exception:
            _log.exception("%s %s failed", request.method, request.path[:200])
            refusal = Refusal(500, "internal", "a fault of the capture; its log says more")
        refusals = self._capture.runs.counts.refusals
        refusals[refusal.code] = refusals.get(refusal.code, 0) + 1
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)


def _unauthenticated() -> Refusal:
    return Refusal(401, "unauthenticated", "the key is missing or wrong", retry=False)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refusal(408, "body_too_slow", f"no body within {BODY_S:g} s") from None


async def _object(request: web.Request) -> dict[str, Any]:
    """The JSON object of a body; an empty one where there is no body."""
    raw = await _body(request)
    if not raw.strip():
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise invalid("the body is no JSON") from None
    if not isinstance(body, dict):
        raise invalid("the body is to be a JSON object")
    wrong = what_is_not_plain(cast("object", body))
    if wrong is not None:
        raise invalid(f"the body holds {wrong}")
    return cast("dict[str, Any]", body)


async def _send(request: web.Request, run: Run, answered: Answered) -> web.StreamResponse:
    """Send an answer to its end. ConnectionError if whoever asked is gone."""
    headers = {"x-run-id": run.run_id}
    if not answered.asked.streams:
        response: web.StreamResponse = web.json_response(answered.answer, headers=headers)
        await response.prepare(request)
    else:
        headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        usage = answered.asked.wants_usage
        for chunk in chunks_of(answered.answer, usage=usage, created=int(time.time())):
            await response.write(chunk)
    await response.write_eof()
    return response


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
