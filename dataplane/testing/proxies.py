"""A client whose every connection goes through fault proxies, one for each store of its plane."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from dataplane.client.aio import AsyncClient, close_everywhere
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.testing.proxy import FaultProxy
from dataplane.wire.address import Address


class Reachable(Protocol):
    """What says how a plane is reached: a MemoryPlane, for one."""

    @property
    def joined(self) -> Joined: ...

    @property
    def config(self) -> Config: ...


class Proxies:
    """The proxies in front of the stores of one plane. Made by `proxied()`."""

    def __init__(self, plane: Reachable) -> None:
        self._config = plane.config
        self._lock = threading.Lock()
        self._by_address: dict[Address, FaultProxy] = {}
        self._clients: list[Client] = []
        self._async_clients: list[AsyncClient] = []
        self.tags = self._proxy_of(plane.joined.tags)
        """The proxy of the tag store; where one process serves both stores, of both."""
        self.joined = dataclasses.replace(
            plane.joined, tags=self.tags.address, reach=self.reach, find=self._found(plane.joined)
        )
        """How a client joins the plane through the proxies."""

    def reach(self, address: Address) -> Address:
        """Where a client finds the server of this address: a proxy, made when it is first asked
        for. From any thread."""
        return self._proxy_of(address).address

    def _found(self, joined: Joined) -> Callable[[], Address | None] | None:
        """How a client finds a tag store that has moved: behind a proxy too."""
        find = joined.find
        if find is None:
            return None

        def found() -> Address | None:
            address = find()
            return None if address is None else self.reach(address)

        return found

    def _proxy_of(self, address: Address) -> FaultProxy:
        with self._lock:
            proxy = self._by_address.get(address)
            if proxy is None:
                proxy = self._by_address[address] = FaultProxy(address)
            return proxy

    @property
    def all(self) -> list[FaultProxy]:
        """Every proxy that clients have come to know of: of value stores with the first put or
        get."""
        with self._lock:
            return list(self._by_address.values())

    def connect(self, **settings: object) -> Client:
        """A blocking client that goes through the proxies. It connects with its first verb, and is
        closed with the proxies at the latest."""
        client = Client(self.joined, self._config.model_copy(update=settings))
        self._clients.append(client)
        return client

    def async_connect(self, **settings: object) -> AsyncClient:
        """The same for asyncio."""
        client = AsyncClient(self.joined, self._config.model_copy(update=settings))
        self._async_clients.append(client)
        return client

    def heal(self) -> None:
        """Nothing is wrong any more, at any store."""
        for proxy in self.all:
            proxy.heal()

    def close(self) -> None:
        """Close the clients and the proxies."""
        for client in self._clients:
            client.close()
        for other in self._async_clients:
            close_everywhere(other)
        for proxy in self.all:
            proxy.close()


@contextmanager
def proxied(plane: Reachable) -> Generator[Proxies]:
    """Proxies in front of every store of a plane, until the end of the block.

    Clients go to all of them by TCP, and map no segment: a client that did would be trusted to have
    stopped when its connection ends.
    """
    proxies = Proxies(plane)
    try:
        yield proxies
    finally:
        proxies.close()
