"""Something else listens where a store of the plane did: its clients find out where it is now."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.errors import InvalidRequest, Unauthenticated
from dataplane.wire.address import Address
from tests.faults.planes import Plane, in_thread

ROW = {"x": torch.arange(1000)}


class Stranger:
    """Says something to whoever calls, and hangs up."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address(None, self._socket.getsockname()[:2])
        self.callers = 0
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                self.callers += 1
                with caller, suppress(OSError):
                    caller.sendall(self.says)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    with in_thread("strangers", timeout_s=20, **roots) as plane:
        plane.client.kv_put("A", "p", ROW)
        yield plane


@pytest.fixture(
    params=[b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", bytes(64)],
    ids=["silence", "http", "zeros"],
)
def stranger(request: pytest.FixtureRequest) -> Iterator[Stranger]:
    stranger = Stranger(request.param)
    yield stranger
    stranger.close()


Keys = Callable[[Joined], list[str]]


def _blocking(plane: Plane) -> Keys:
    def keys(joined: Joined) -> list[str]:
        with Client(joined, plane.config) as client:
            return client.kv_batch_get(["A"], "p", timeout=5).keys

    return keys


def _asyncio(plane: Plane) -> Keys:
    async def get(joined: Joined) -> list[str]:
        client = AsyncClient(joined, plane.config)
        try:
            return (await client.kv_batch_get(["A"], "p", timeout=5)).keys
        finally:
            await client.close()

    return lambda joined: asyncio.run(get(joined))


@pytest.mark.parametrize("kind", [_blocking, _asyncio])
def test_a_tag_store_that_moved_is_found_where_a_stranger_is_now(
    plane: Plane, stranger: Stranger, kind: Callable[[Plane], Keys]
) -> None:
    there = plane.joined.tags
    joined = replace(plane.joined, tags=stranger.address, find=lambda: there)
    assert kind(plane)(joined) == ["A"]
    assert stranger.callers == 1


def test_a_value_store_that_moved_is_asked_for_again(plane: Plane, stranger: Stranger) -> None:
    answers: list[Any] = [stranger.address]
    joined = replace(plane.joined, reach=lambda address: answers.pop() if answers else address)
    with Client(joined, plane.config) as client:
        if stranger.says:  # what is wrong with it is said once: it may be a matter of settings
            with pytest.raises((Unauthenticated, InvalidRequest)):
                client.kv_batch_get(["A"], "p", timeout=5)
        assert client.kv_batch_get(["A"], "p", timeout=5).keys == ["A"]
    assert stranger.callers == 1


@pytest.mark.parametrize("kind", [_blocking, _asyncio])
def test_a_secret_that_is_wrong_is_said_at_once(
    plane: Plane, kind: Callable[[Plane], Keys]
) -> None:
    asked: list[int] = []

    def find() -> Address:
        asked.append(1)
        return plane.joined.tags

    with pytest.raises(Unauthenticated):
        kind(plane)(replace(plane.joined, secret=b"x" * 32, find=find))
    assert asked == [1]
