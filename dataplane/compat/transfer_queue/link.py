"""The way of one process to an instance: its plane, from threads and from any event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dataplane import session
from dataplane.client.aio import AsyncClient, close_everywhere
from dataplane.client.core import Core, Joined
from dataplane.client.effects import Verb
from dataplane.client.sync import Client
from dataplane.config import Config

from .verbs.listing import Listings

Result = TypeVar("Result")


def settings_in(info: Mapping[str, Any]) -> Config:
    """The settings of the plane that `zmq_info` describes."""
    given: Any = info.get("config") or {}
    return session.settings_of({str(name): given[name] for name in given})


class Link:
    """Both clients of one plane, made at once and connected when they are used."""

    def __init__(self, joined: Joined, config: Config) -> None:
        self.joined = joined
        self.config = config
        self.sync = Client(joined, config)
        self.aio = AsyncClient(joined, config)
        self.listings = Listings()

    @classmethod
    def join(cls, plane: str, config: Config) -> Link:
        """The link to the plane of this name on the Ray cluster. PlaneLost if there is none."""
        return cls(session.join(plane, None, config), config)

    @classmethod
    def at(cls, info: Mapping[str, Any], config: Config) -> Link:
        """The link that `info()` of another process of this machine describes; it needs no Ray."""
        return cls(session.join(str(info["plane"]), str(info["address"]), config), config)

    def run(
        self, verb: Callable[[Core, float], Verb[Result]], timeout: float | None = None
    ) -> Result:
        """The result of a verb, in this thread."""
        return self.sync.run(verb, timeout)

    async def run_async(
        self, verb: Callable[[Core, float], Verb[Result]], timeout: float | None = None
    ) -> Result:
        """The result of a verb, on the running event loop; each loop has its own connections."""
        return await self.aio.run(verb, timeout)

    def close(self, *, destroy: bool = False) -> None:
        """Let go of the plane, or end it for everybody; from any thread. Repeatable."""
        close_everywhere(self.aio)
        self.sync.close(destroy)
