"""A capture in front of a rollout server, and an agent that talks to it over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agentloop.capture.journal import Journal
from agentloop.capture.publisher import Publication, Publisher
from agentloop.capture.runs import Runs
from agentloop.capture.server import CaptureServer
from agentloop.capture.service import Capture
from agentloop.capture.settings import CaptureSettings, RunLimits, UpstreamSettings
from agentloop.capture.upstream import Upstream
from agentloop.engines.http import Limits
from agentloop.engines.retry import Budget
from agentloop.trajectory.state import RolloutState
from tests.agentloop.rollout_server import LETTERS, RolloutServer

ADMIN = "the-servers-key"

FAST = Limits(retry=Budget(tries=2, base_s=0.001, cap_s=0.01), request_timeout_s=20.0)


@dataclass
class Shelf:
    """A publisher that keeps what it is given, and fails when told to."""

    publications: list[Publication] = field(default_factory=list[Publication])
    errors: list[Exception] = field(default_factory=list[Exception])
    """One for each of the next calls."""

    async def publish(self, publication: Publication) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.publications.append(publication)

    async def begin_group(self, uid: str, n: int, declared_bytes: int | None) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return 17

    async def end_group(self, attempt: int) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "finished"

    @property
    def states(self) -> list[RolloutState]:
        """Of the only publication."""
        (publication,) = self.publications
        return publication.ended.states


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Agent:
    """Somebody outside: a session, the address, and the keys that it shows."""

    session: aiohttp.ClientSession
    url: str
    key: str | None = ADMIN

    async def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = "", **headers: str
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        status, parsed, _ = await self.whole(method, path, body, key=key, **headers)
        return status, parsed

    async def whole(
        self, method: str, path: str, body: Any = None, *, key: str | None = "", **headers: str
    ) -> tuple[int, Any, Any]:
        """The same with the headers. Arguments name headers with _ for -."""
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        key = self.key if key == "" else key
        if key is not None:
            shown["Authorization"] = f"Bearer {key}"
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        async with self.session.request(
            method, self.url + path, data=raw, headers=shown
        ) as response:
            text = await response.text()
            parsed = json.loads(text) if text.startswith(("{", "[")) else text
            return response.status, parsed, response.headers

    async def start(self, **body: Any) -> OfRun:
        """A run, and whoever acts in it."""
        status, told = await self.ask("POST", "/v1/runs", body)
        assert status == 201, told
        return OfRun(self, told["run_id"], told["api_key"], told["base_url"])


@dataclass
class OfRun:
    """An agent in its run."""

    agent: Agent
    run_id: str
    key: str
    base_url: str

    async def chat(self, messages: Sequence[Any], **fields: Any) -> tuple[int, Any]:
        """A chat request of six tokens, if no field says otherwise."""
        headers = {name[2:]: fields.pop(name) for name in list(fields) if name.startswith("h_")}
        body = {"model": "gpt", "messages": list(messages), "max_tokens": 6, **fields}
        return await self.agent.ask(
            "POST", f"/runs/{self.run_id}/v1/chat/completions", body, key=self.key, **headers
        )

    async def say(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """The assistant's message."""
        status, answer = await self.chat(messages, **fields)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def end(self, reward: float | None = 1.0, **body: Any) -> tuple[int, Any]:
        if reward is not None:
            body["reward"] = reward
        return await self.agent.ask("POST", f"/v1/runs/{self.run_id}/end", body, key=self.key)

    async def shown(self) -> dict[str, Any]:
        status, told = await self.agent.ask("GET", f"/v1/runs/{self.run_id}", key=self.key)
        assert status == 200, told
        return told


@dataclass
class Setup:
    """Everything of one capture that runs."""

    upstream: RolloutServer
    agent: Agent
    capture: Capture
    publisher: Any
    clock: Clock


@asynccontextmanager
async def capturing(
    software: str = "vllm",
    publisher: Publisher | None = None,
    *,
    journal: Path | None = None,
    admin_key: str | None = ADMIN,
    limits: RunLimits | None = None,
    upstream: dict[str, Any] | None = None,
    partition_id: str = "train",
    agents_may_reward: bool = True,
    server: RolloutServer | None = None,
) -> AsyncIterator[Setup]:
    """A capture before a new server, or before this one."""
    limits = limits or RunLimits()
    async with _served(server, software) as behind:
        known = {"flavour": f"{behind.software}-chat", "model": "m"}
        asked = {"url": behind.url, "logprob_kind": "raw", "limits": FAST, **known}
        settings = CaptureSettings(
            UpstreamSettings(**{**asked, **(upstream or {})}),
            partition_id,
            limits=limits,
            agents_may_reward=agents_may_reward,
        )
        clock = Clock()
        runs = Runs(limits, None if journal is None else Journal(journal))
        runs.restore(clock())
        shelf = publisher or Shelf()
        capture = Capture(settings, Upstream(settings.upstream), shelf, runs, now=clock)
        listens = CaptureServer(capture, settings, admin_key=admin_key)
        url = await listens.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as session:
                yield Setup(behind, Agent(session, url, admin_key), capture, shelf, clock)
        finally:
            await listens.stop()


@asynccontextmanager
async def _served(server: RolloutServer | None, software: str) -> AsyncIterator[RolloutServer]:
    if server is not None:
        yield server
        return
    async with RolloutServer(software) as made:
        yield made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def prompt_ids(*messages: Any) -> list[int]:
    """What the server's template makes of a conversation."""
    return LETTERS.prompt(messages)
