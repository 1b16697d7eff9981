"""Calls between a process and its child: any order, bounded, and never a hang on who is gone."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest

from agentloop.processes import calls
from agentloop.processes.calls import CallFailed, Calls, Disconnected


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Calls, Calls, dict[str, asyncio.Event]]]:
    gates = {"first": asyncio.Event()}

    async def held(body: Any) -> Any:
        await gates["first"].wait()
        return body

    async def echo(body: Any) -> Any:
        return body

    async def fail(body: Any) -> Any:
        raise ValueError(f"not {body}")

    ours, theirs = socket.socketpair()
    asker = await Calls.over(ours, {"echo": echo})
    answerer = await Calls.over(theirs, {"echo": echo, "fail": fail, "held": held})
    yield asker, answerer, gates
    await asker.close()
    await answerer.close()


async def test_both_ends_ask_and_are_answered(ends: Any) -> None:
    asker, answerer, _ = ends
    body = {"ids": [1, 2], "text": "ä", "none": None, "bytes": b"\x00"}
    assert await asker.ask("echo", body) == body
    assert await answerer.ask("echo", 1) == 1


async def test_answers_come_in_any_order(ends: Any) -> None:
    asker, _, gates = ends
    held = asyncio.create_task(asker.ask("held", "late"))
    assert await asker.ask("echo", "early") == "early"
    assert not held.done()
    gates["first"].set()
    assert await held == "late"


async def test_an_error_is_told_and_the_connection_goes_on(ends: Any) -> None:
    asker, _, _ = ends
    with pytest.raises(CallFailed, match="ValueError: not 7"):
        await asker.ask("fail", 7)
    with pytest.raises(CallFailed, match="KeyError"):
        await asker.ask("no such verb")
    assert await asker.ask("echo", 2) == 2


async def test_a_call_that_is_cancelled_is_cancelled_on_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asker = await Calls.over(ours, {})
    answerer = await Calls.over(theirs, {"endless": endless})
    asking = asyncio.create_task(asker.ask("endless"))
    await begun.wait()
    asking.cancel()
    await asyncio.wait_for(ended.wait(), 10)
    with pytest.raises(CallFailed, match="KeyError"):  # and the connection goes on
        await asker.ask("other")
    await asker.close()
    await answerer.close()


class Late(TimeoutError):
    pass


async def test_named_errors_cross_as_what_they_are() -> None:
    errors = {"timeout": TimeoutError, "late": Late}
    raised: list[Exception] = [TimeoutError("a"), Late("b"), KeyError("c")]

    async def fail(_: Any) -> None:
        raise raised.pop(0)

    ours, theirs = socket.socketpair()
    asker = await Calls.over(ours, {}, errors)
    answerer = await Calls.over(theirs, {"fail": fail}, errors)
    for kind, text in ((TimeoutError, "a"), (Late, "b"), (CallFailed, "KeyError: 'c'")):
        with pytest.raises(kind) as told:
            await asker.ask("fail")
        assert (type(told.value), str(told.value)) == (kind, text)
    await asker.close()
    await answerer.close()


async def test_what_is_no_plain_data_is_refused_on_either_side(ends: Any) -> None:
    asker, answerer, _ = ends
    with pytest.raises(CallFailed, match="'echo' is not plain data"):
        await asker.ask("echo", object())

    async def strange(_: Any) -> Any:
        return object()

    answerer._handlers["strange"] = strange
    with pytest.raises(CallFailed, match="not plain data"):
        await asker.ask("strange")
    assert await asker.ask("echo", 3) == 3


async def test_who_waits_is_told_that_the_other_side_is_gone(ends: Any) -> None:
    asker, answerer, _ = ends
    held = asyncio.create_task(asker.ask("held"))
    await asker.ask("echo")  # the request before it has been sent
    await answerer.close()
    with pytest.raises(Disconnected):
        await held
    await asker.gone()
    with pytest.raises(Disconnected):
        await asker.ask("echo")


async def test_messages_beyond_the_limit_are_refused_before_they_are_sent(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, _, _ = ends
    monkeypatch.setattr(calls, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(CallFailed, match="1000 are allowed"):
        await asker.ask("echo", "x" * 1001)
    assert await asker.ask("echo", "short") == "short"


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", 1 << 31) + b"x",
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + msgpack.packb(5),
        struct.pack("<I", 2) + msgpack.packb([1]),
        struct.pack("<I", 4) + msgpack.packb(["ask", 1, "echo"])[:4],
    ],
)
async def test_what_is_no_message_ends_the_connection_and_nothing_else(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    end = await Calls.over(ours, {})
    theirs.sendall(sent)
    theirs.close()
    await asyncio.wait_for(end.gone(), 10)
    with pytest.raises(Disconnected):
        await end.ask("echo")
    await end.close()
