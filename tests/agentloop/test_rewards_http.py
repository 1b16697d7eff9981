"""A judge behind HTTP, asked over a real socket: well behaved, and with every fault."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agentloop.rewards import HttpJudge, RewardError
from tests.agentloop.judged import judged

Answer = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A judge whose answers are scripted: one entry per request, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [_rewards]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.url = ""
        self.closing = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(body)
        self.headers.append(request.headers)
        return await answer(body, request)

    async def hang(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await self.closing.wait()
        return web.Response()


async def _rewards(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    return web.json_response({"rewards": [float(item["response"]) for item in body["items"]]})


def says(text: str | bytes, status: int = 200, **headers: str) -> Answer:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        data = text.encode() if isinstance(text, str) else text
        return web.Response(body=data, status=status, headers=headers)

    return answer


async def drops(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_off(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"rewards"')
    assert request.transport is not None
    request.transport.abort()
    return reply


async def endless(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse()
    await reply.prepare(request)
    try:
        while True:
            await reply.write(b" " * 65536)
    except ConnectionError:
        return reply


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/judge", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made.url = f"http://127.0.0.1:{port}/judge"
    yield made
    made.closing.set()
    await runner.cleanup()


@pytest.fixture
async def judge(server: Server) -> AsyncIterator[HttpJudge]:
    judge = HttpJudge(server.url, timeout_s=10, try_timeout_s=5, tries=3, backoff_s=0.001)
    yield judge
    await judge.close()


async def test_a_batch_is_one_request_with_everything_a_judge_needs(
    server: Server, judge: HttpJudge
) -> None:
    states = [judged("0.5", answer="4", data_source="sums"), judged("1")]
    assert await judge.score(states) == [{"score": 0.5}, {"score": 1.0}]
    (body,) = server.requests
    assert body["items"][0] == {
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "response": "0.5",
        "row": {"answer": "4", "data_source": "sums"},
        "uid": "u",
        "session_id": 0,
        "index": 0,
        "data_source": "sums",
        "finish_reason": "stop",
    }


async def test_replies_may_say_more_than_a_score(server: Server, judge: HttpJudge) -> None:
    server.answers = [says(json.dumps({"rewards": [{"score": 1, "why": "fine"}], "model": "m"}))]
    assert await judge.score([judged("x")]) == [{"score": 1.0, "why": "fine"}]


async def test_large_batches_are_cut_and_put_together_in_order(server: Server) -> None:
    judge = HttpJudge(server.url, batch_size=3, connections=2)
    said = await judge.score([judged(str(n)) for n in range(8)])
    await judge.close()
    assert [one["score"] for one in said] == [float(n) for n in range(8)]
    assert sorted(len(body["items"]) for body in server.requests) == [2, 3, 3]


async def test_only_named_columns_and_the_given_headers_are_sent(server: Server) -> None:
    judge = HttpJudge(server.url, columns=["answer"], headers={"Authorization": "Bearer key"})
    await judge.score([judged("1", answer="4", secret="s", images=[b"\0"])])
    await judge.close()
    assert server.requests[0]["items"][0]["row"] == {"answer": "4"}
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert server.headers[0]["Accept-Encoding"] == "identity"


async def test_numbers_of_numpy_are_sent_and_bytes_are_refused(
    server: Server, judge: HttpJudge
) -> None:
    await judge.score([judged("1", a=np.float32(0.5), b=np.arange(2))])
    assert server.requests[0]["items"][0]["row"] == {"a": 0.5, "b": [0, 1]}
    for value in (b"\0", math.nan, object()):
        with pytest.raises(RewardError, match="the judge's request has no JSON form"):
            await judge.score([judged("1", a=value)])
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_an_overloaded_judge_is_asked_again(
    server: Server, judge: HttpJudge, status: int
) -> None:
    server.answers = [says("busy", status), says("busy", status), _rewards]
    assert await judge.score([judged("1")]) == [{"score": 1.0}]
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", [drops, breaks_off], ids=lambda f: f.__name__)
async def test_a_lost_connection_is_made_again(
    server: Server, judge: HttpJudge, fault: Answer
) -> None:
    server.answers = [fault, _rewards]
    assert await judge.score([judged("1")]) == [{"score": 1.0}]
    assert len(server.requests) == 2


async def test_tries_are_counted(server: Server, judge: HttpJudge) -> None:
    server.answers = [says("no", 500)]
    with pytest.raises(RewardError, match="failed 3 times; last: status 500"):
        await judge.score([judged("1")])
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 301, 204])
async def test_a_refusal_is_not_repeated(server: Server, judge: HttpJudge, status: int) -> None:
    server.answers = [says("" if status == 204 else "you may not", status, Location="/elsewhere")]
    with pytest.raises(RewardError, match=f"refused: status {status}"):
        await judge.score([judged("1")])
    assert len(server.requests) == 1


async def test_a_hanging_judge_is_left_at_the_deadline(server: Server) -> None:
    server.answers = [server.hang]
    judge = HttpJudge(server.url, timeout_s=1.0, try_timeout_s=5)
    with pytest.raises(RewardError, match=r"no verdict within 1 s"):
        await judge.score([judged("1")])
    await judge.close()
    assert len(server.requests) == 1


async def test_a_try_that_hangs_is_given_up_for_the_next(server: Server) -> None:
    server.answers = [server.hang, _rewards]
    judge = HttpJudge(server.url, timeout_s=30, try_timeout_s=1.0, backoff_s=0.001)
    assert await judge.score([judged("1")]) == [{"score": 1.0}]
    await judge.close()


async def test_waits_that_the_server_asks_for_end_at_the_deadline(server: Server) -> None:
    server.answers = [says("later", 429, **{"Retry-After": "3600"})]
    judge = HttpJudge(server.url, timeout_s=1.0)
    with pytest.raises(RewardError, match=r"within 1 s; last: status 429"):
        await judge.score([judged("1")])
    await judge.close()


async def test_nobody_there_is_a_reward_error(unused_tcp_port_of_this_test: int) -> None:
    judge = HttpJudge(f"http://127.0.0.1:{unused_tcp_port_of_this_test}/", tries=2, backoff_s=0.001)
    with pytest.raises(RewardError, match="failed 2 times; last: ClientConnector"):
        await judge.score([judged("1")])
    await judge.close()


@pytest.fixture
def unused_tcp_port_of_this_test() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


async def test_an_address_that_is_none_is_a_reward_error() -> None:
    judge = HttpJudge("nonsense")
    with pytest.raises(RewardError, match="no address"):
        await judge.score([judged("1")])
    await judge.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ('{"rewards": [1.0]}', "2 rewards were due.*got 1"), ('{"rewards": [1, 2, 3]}', "got 3"),
        ('{"rewards": [1.0, NaN]}', "reward 1 of 2.*nan"), ('{"rewards": [1.0, 1e999]}', "inf"),
        ('{"rewards": [1.0, null]}', "NoneType"), ('{"rewards": [1.0, "1"]}', "got str"),
        ('{"rewards": {"0": 1}}', "got dict"), ("[1.0, 2.0]", "without a list 'rewards'"),
        ("{}", "without a list"), ("<html>", "no JSON"), ("", "no JSON"), (b"\xff\xfe", "no JSON"),
        ("[" * 100_000, "no JSON"), ('{"rewards": [1.0, {"reward": 1}]}', "needs a 'score'"),
    ],
)  # fmt: skip
async def test_a_wrong_reply_is_no_reward_and_not_asked_for_again(
    server: Server, judge: HttpJudge, reply: str | bytes, message: str
) -> None:
    server.answers = [says(reply)]
    with pytest.raises(RewardError, match=message):
        await judge.score([judged("1"), judged("2")])
    assert len(server.requests) == 1


@pytest.mark.parametrize("how", ["declared", "endless"])
async def test_an_oversized_reply_is_not_read(server: Server, how: str) -> None:
    async def declared(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": "200001"})
        await reply.prepare(request)  # and not one byte of it comes
        await server.closing.wait()
        return reply

    server.answers = [endless if how == "endless" else declared]
    judge = HttpJudge(server.url, reply_bytes=200_000, timeout_s=20)
    with pytest.raises(RewardError, match="more than 200000 bytes"):
        await judge.score([judged("1")])
    await judge.close()
    assert len(server.requests) == 1


async def test_a_compressed_reply_is_refused(server: Server, judge: HttpJudge) -> None:
    server.answers = [says(b"\x1f\x8b", 200, **{"Content-Encoding": "gzip"})]
    with pytest.raises(RewardError, match="compressed"):
        await judge.score([judged("1")])


async def test_a_closed_judge_says_so(server: Server, judge: HttpJudge) -> None:
    await judge.score([judged("1")])
    await judge.close()
    with pytest.raises(RewardError, match="closed"):
        await judge.score([judged("1")])
