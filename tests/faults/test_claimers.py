"""Consumers that die, stop, break off and give up: every row is committed once, none is stuck."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.claims import claim_rows
from dataplane.client.connection import Connection
from dataplane.client.core import Joined
from dataplane.client.effects import Ask
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import ClaimLost
from dataplane.tags import journal as j
from dataplane.types import Claim
from dataplane.wire.channel import Broken
from tests.dataplane.journal_file import read
from tests.deadline import eventually
from tests.faults.planes import Plane, in_thread
from tests.faults.processes import Process, Speaker

pytestmark = pytest.mark.faults

ROWS = 10_000
CLAIMERS = 16
LEASE_S = 0.5


def records(plane: Plane) -> Iterator[tuple[int, Any]]:
    """Kind and body of every record of the plane's journal."""
    for kind, _, _, body in read(plane.folders.runtime / "journal" / j.journal_name(1))[1]:
        yield kind, body


def put_rows(client: Client, partition: str, count: int) -> list[str]:
    keys = [f"k{i}" for i in range(count)]
    for at in range(0, count, 1000):
        part = range(at, min(at + 1000, count))
        client.kv_batch_put(
            [keys[i] for i in part], partition, {"x": torch.tensor(part)}, [{"n": i} for i in part]
        )
    return keys


def waits(plane: Plane, partition: str, task: str = "t", count: int = 1) -> None:
    """Until so many claims wait for rows."""
    word = "1 claim waits" if count == 1 else f"{count} claims wait"
    eventually(
        lambda: word in plane.client.explain(partition, task=task).text,
        f"{word} in {partition}",
    )


# -- killed, one after the other -------------------------------------------------------------


def consume(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Claim and commit until there is nothing left, and read some; say what is to be committed."""
    with Client(joined, config) as client:
        while True:
            claim = client.kv_claim(
                partition, "train", count=2, fields=["x"], lease_s=LEASE_S, timeout=60
            )
            if claim.end:
                break
            speaker.say((claim.claim_id, claim.keys, claim.deliveries))
            if claim.claim_id % 2 == 0:
                rows = client.kv_batch_get(claim.keys, partition, ["x"], layout="list")
                assert [int(x) for x in rows.fields["x"]] == [tags["n"] for tags in claim.tags]
            client.kv_commit(claim)
        speaker.say("end")
        speaker.hear()  # whoever may be killed is still there


def hold(speaker: Speaker, joined: Joined, config: Config, partition: str, lease_s: float) -> None:
    """Hold a claim, and commit it when told to."""
    client = Client(joined, config)
    claim = client.kv_claim(partition, "train", count=2, lease_s=lease_s, timeout=20)
    speaker.say(claim.keys)
    speaker.hear()
    client.kv_commit(claim)
    speaker.say("committed")
    client.close()


class Crowd:
    """Claimers, what they said, and which of them have ended."""

    def __init__(self, stack: ExitStack, start: Callable[[], Process]) -> None:
        self._stack = stack
        self._start = start
        self.running: list[Process] = []
        self.said: dict[int, tuple[list[str], list[int]]] = {}
        """Keys and deliveries of each claim."""
        self.killed = 0
        self._random = random.Random(3)

    def enter(self) -> None:
        self.running.append(self._stack.enter_context(self._start()))

    def listen(self, until: float, claims: int) -> None:
        """Take what they say, up to a moment or to so many claims in all."""
        while self.running and len(self.said) < claims and (left := until - time.monotonic()) > 0:
            pipes = {process._ours: process for process in self.running}
            for pipe in wait(list(pipes), left):
                self._take(pipes[pipe])  # pyright: ignore[reportArgumentType]

    def _take(self, process: Process) -> None:
        said = process.says()
        self.running.remove(process)
        if said == "end":
            process.hears("go")
        else:
            self._note(*said)
            self.running.append(process)

    def _note(self, claim_id: int, keys: list[str], deliveries: list[int]) -> None:
        self.said[claim_id] = keys, deliveries

    def kill_one(self) -> None:
        """End one, in the middle of whatever it does, and replace it."""
        victim = self.running.pop(self._random.randrange(len(self.running)))
        victim.kill()
        self.killed += 1
        try:
            while victim._ours.poll(0) and (said := victim.says()) != "end":
                self._note(*said)
        except (EOFError, OSError):
            pass  # it was cut off in the middle of a word
        self.enter()


def test_sixteen_claimers_commit_each_row_once_while_one_is_killed_every_second(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    keys = put_rows(plane.client, "train", ROWS)
    plane.client.kv_seal_partition("train")
    with ExitStack() as stack:
        holder = stack.enter_context(Process(hold, plane.joined, plane.config, "train", LEASE_S))
        held = holder.says()
        crowd = Crowd(stack, lambda: Process(consume, plane.joined, plane.config, "train"))
        for _ in range(CLAIMERS):
            crowd.enter()
        holder.kill()
        while crowd.running:
            # Every second, and where they are fast before all of it is done.
            crowd.listen(time.monotonic() + 1.0, len(crowd.said) + ROWS // 10)
            if crowd.running:
                crowd.kill_one()
    commits = Counter[str]()
    expiries = Counter[str]()
    offers = Counter[str]()
    for kind, body in records(plane):
        if kind == j.COMMIT:
            _, task, claim_id, committed, *_ = body
            assert task == "train"
            commits.update(committed)
            said, deliveries = crowd.said[claim_id]
            assert said == committed
            # What a claim was told is how often its rows had been offered.
            assert deliveries == [offers[key] for key in committed]
        elif kind == j.RELEASE:
            assert body[-1] == "expired"
            expiries.update(body[3])
        elif kind == j.CLAIM:
            offers.update(key for grant in body[5] for key in grant[3])
    assert commits == Counter(keys)
    assert offers == commits + expiries
    assert crowd.killed >= 2
    assert min(offers[key] for key in held) >= 2
    print(f"\n{crowd.killed} killed, {len(expiries)} rows offered again")


# -- stopped ---------------------------------------------------------------------------------


def test_time_in_which_the_plane_was_stopped_ends_no_lease(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    put_rows(plane.client, "p", 8)
    lease_s = 1.0
    with ExitStack() as stack:
        alive = [
            stack.enter_context(Process(hold, plane.joined, plane.config, "p", lease_s))
            for _ in range(3)
        ]
        held = [process.says() for process in alive]
        dead = stack.enter_context(Process(hold, plane.joined, plane.config, "p", lease_s))
        lost = dead.says()
        dead.kill()
        eventually(lambda: plane.client.status()["clients"] == 4, "the plane knows who is dead")
        os.kill(plane.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        eventually(lambda: time.monotonic() - stopped > 2.5 * lease_s, "it is stopped for long")
        os.kill(plane.pid, signal.SIGCONT)
        resumed = time.monotonic()
        claim = plane.client.kv_claim("p", "train", count=2, timeout=20)
        # The dead one's term went on from where it was; nobody else's ran.
        assert time.monotonic() - resumed > lease_s / 4
        assert claim.keys == lost
        assert claim.deliveries == [2, 2]
        for process in alive:
            process.hears("commit")
        assert [process.says() for process in alive] == ["committed"] * 3
    assert sorted(chain(lost, *held)) == [f"k{i}" for i in range(8)]


def test_a_stopped_client_keeps_its_claim_for_as_long_as_it_is_connected(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    put_rows(plane.client, "p", 2)
    with Process(hold, plane.joined, plane.config, "p", 0.1) as process:
        process.says()
        process.stop()
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 0.5, "it is stopped for long")
        process.resume()
        process.hears("commit")
        assert process.says() == "committed"


# -- gone while they wait --------------------------------------------------------------------


def ask(speaker: Speaker, joined: Joined, config: Config, partition: str, count: int) -> None:
    """Ask for rows; an interrupted call is made again."""
    client = Client(joined, config)
    speaker.say("asking")
    try:
        claim = client.kv_claim(partition, "t", count=count, timeout=60)
    except KeyboardInterrupt:
        speaker.say("interrupted")
        speaker.hear()
        claim = client.kv_claim(partition, "t", count=count, timeout=60)
    speaker.say((claim.keys, claim.deliveries))
    client.close()


def test_who_is_killed_while_waiting_does_not_hold_up_the_next_one(plane: Plane) -> None:
    plane.client.kv_put("first", "queue", tags={})
    with Process(ask, plane.joined, plane.config, "queue", 3) as dead:
        assert dead.says() == "asking"
        waits(plane, "queue")
        with Process(ask, plane.joined, plane.config, "queue", 2) as next_one:
            assert next_one.says() == "asking"
            waits(plane, "queue", count=2)
            dead.kill()
            waits(plane, "queue")
            plane.client.kv_put("second", "queue", tags={})
            assert next_one.says() == (["first", "second"], [1, 1])


def test_an_interrupted_claim_leaves_nothing_behind(plane: Plane) -> None:
    with Process(ask, plane.joined, plane.config, "interrupted", 2) as process:
        assert process.says() == "asking"
        plane.client.kv_put("a", "interrupted", tags={})
        waits(plane, "interrupted")
        process.signal(signal.SIGINT)
        assert process.says() == "interrupted"
        plane.client.kv_put("b", "interrupted", tags={})
        process.hears("go on")
        assert process.says() == (["a", "b"], [1, 1])


# -- answers that are lost -------------------------------------------------------------------


def claim_of(client: Client, partition: str, after: Callable[[Any], None]) -> Claim:
    """A claim of two rows. `after` sees each answer first; what it raises, the verb takes for the
    outcome."""
    deadline = time.monotonic() + 20
    verb = claim_rows(client._core, partition, "t", 2, [], None, None, False, 30.0, None, deadline)

    def watched() -> Generator[Any, Any, Claim]:
        effect = verb.send(None)
        try:
            while True:
                try:
                    value = yield effect
                    if type(effect) is Ask:
                        after(value.body)
                except BaseException as error:
                    effect = verb.throw(error)
                else:
                    effect = verb.send(value)
        except StopIteration as end:
            return end.value

    return client._drive(watched(), deadline)


def test_a_claim_whose_answer_was_lost_is_answered_alike(plane: Plane) -> None:
    put_rows(plane.client, "lost answer", 4)
    answers: list[list[Any]] = []

    def lose_the_first(answer: list[Any]) -> None:
        answers.append(answer)
        if len(answers) == 1:
            plane.client.kv_put("k0", "lost answer", tags={"n": 77})
            raise Broken("lost")

    claim = claim_of(plane.client, "lost answer", lose_the_first)
    assert answers[0] == answers[1]
    assert claim.keys == ["k0", "k1"]
    assert claim.tags == [{"n": 0}, {"n": 1}]
    assert claim.deliveries == [1, 1]
    assert plane.client.kv_claim("lost answer", "t", count=2, timeout=5).keys == ["k2", "k3"]


@pytest.mark.parametrize("told", [True, False], ids=["at once", "with the next claim"])
def test_rows_that_were_granted_to_who_gave_up_go_back(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    partition = f"given up {told}"
    put_rows(plane.client, partition, 2)
    if not told:  # the connection is gone by then

        def broken(*_: Any) -> None:
            raise Broken("gone")

        monkeypatch.setattr(Connection, "tell", broken)

    def give_up(answer: list[Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        claim_of(plane.client, partition, give_up)
    if told:
        with plane.another() as other:
            claim = other.kv_claim(partition, "t", count=2, timeout=5)
    else:
        claim = plane.client.kv_claim(partition, "t", count=2, timeout=5)
        assert plane.client._core.claims.begin()[1] == []
    assert claim.keys == ["k0", "k1"]
    assert claim.deliveries == [1, 1]


def test_a_cancelled_coroutine_leaves_nothing_behind(plane: Plane) -> None:
    async def scenario() -> Claim:
        async with AsyncClient(plane.joined, plane.config) as client:
            waiting = asyncio.create_task(client.kv_claim("cancelled", "t", count=2, timeout=60))
            await client.kv_put("k0", "cancelled", tags={})
            await asyncio.to_thread(waits, plane, "cancelled")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await client.kv_put("k1", "cancelled", tags={})
            return await client.kv_claim("cancelled", "t", count=2, timeout=20)

    claim = asyncio.run(scenario())
    assert claim.keys == ["k0", "k1"]
    assert claim.deliveries == [1, 1]


def test_a_cancelled_coroutine_does_not_hold_up_others(plane: Plane) -> None:
    async def scenario() -> Claim:
        async with AsyncClient(plane.joined, plane.config) as client:
            waiting = asyncio.create_task(client.kv_claim("withdrawn", "t", count=1, timeout=60))
            await asyncio.to_thread(waits, plane, "withdrawn")
            other = asyncio.create_task(
                asyncio.to_thread(plane.client.kv_claim, "withdrawn", "t", count=1, timeout=20)
            )
            await asyncio.to_thread(waits, plane, "withdrawn", count=2)
            waiting.cancel()
            await asyncio.to_thread(waits, plane, "withdrawn")
            await client.kv_put("k0", "withdrawn", tags={})
            return await other

    plane.client.kv_create_partition("withdrawn")
    assert asyncio.run(scenario()).deliveries == [1]


def test_a_wait_whose_connection_broke_goes_on_on_another_one(roots: dict[str, Any]) -> None:
    with in_thread("claims", timeout_s=20, **roots) as plane, plane.another() as client:
        assert plane.server is not None
        loop = plane.server._servers[0].get_loop()
        plane.client.kv_put("k0", "p", tags={})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.kv_claim, "p", "t", count=2, timeout=20)
            for _ in range(3):
                waits(plane, "p")
                cut = asyncio.run_coroutine_threadsafe(cut_connections(plane, client), loop)
                assert cut.result(10) >= 1
            waits(plane, "p")
            plane.client.kv_put("k1", "p", tags={})
            claim = waiting.result(20)
        assert claim.keys == ["k0", "k1"]
        client.kv_commit(claim)
        with pytest.raises(ClaimLost):
            client.kv_release(claim)


async def cut_connections(plane: Plane, client: Client) -> int:
    """Close a client's connections from the server's side; how many there were."""
    assert plane.server is not None
    mine = [c for c in plane.server._connections if c.client_id == client.client_id]
    for connection in mine:
        connection.transport.abort()
    return len(mine)
