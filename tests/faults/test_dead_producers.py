"""Nobody waits for the dead without hearing of it: who died, what it left, and since when."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DeadlineExceeded
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker

pytestmark = pytest.mark.faults

LATE_S = 0.5
"""The deadline of waits that are in vain."""
PROMPT = {"is_prompt": True, "status": "running"}
FINISHED = {"is_prompt": True, "status": "finished"}


def write_a_prompt(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Set a prompt to running, and go on for ever."""
    with Client(joined, config) as client:
        client.kv_put("p7", partition, None, PROMPT)
        speaker.say(client.client_id)
        speaker.hear()


def run_a_group(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Begin a group of four sessions, and get no further than the third."""
    with Client(joined, config) as client:
        attempt = client.begin_group("B", partition, n=4)
        for number in range(3):
            tags = {"session_id": number, "status": "completed"}
            client.kv_put(f"B_{number}_0", partition, None, tags, attempt=attempt)
        speaker.say(client.client_id)
        speaker.hear()


def claim_two(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Claim two rows, and never commit them."""
    with Client(joined, config) as client:
        client.kv_claim(partition, "train", count=2, lease_s=600)
        speaker.say(client.client_id)
        speaker.hear()


def dies(plane: Plane, process: Process, partition: str) -> str:
    """Kill the producer that has said who it is, and wait until the plane knows; who it was."""
    client_id = process.says()
    process.kill()
    eventually(
        lambda: plane.client.explain(partition, FINISHED).stuck[0]["alive"] is False,
        "the plane knows that the producer is gone",
    )
    return client_id


def late(call: Callable[[], Any]) -> str:
    """The explanation of a wait that is in vain, and that ends soon after its deadline."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as error:
        call()
    assert LATE_S <= time.monotonic() - started < LATE_S + 1.0
    assert error.value.explanation is not None
    return error.value.explanation


# -- producers -------------------------------------------------------------------------------


def test_a_prompt_whose_producer_was_killed_is_named_with_its_age_and_its_last_writer(
    plane: Plane, partition: str
) -> None:
    # verl#7155: the sampler waits while any prompt is running, and one will be for ever.
    with Process(write_a_prompt, plane.joined, plane.config, partition) as process:
        client_id = dies(plane, process, partition)
        [stuck] = plane.client.explain(partition, FINISHED, count=1).stuck
        assert (stuck["key"], stuck["status"], stuck["alive"]) == ("p7", "running", False)
        assert stuck["client_id"] == client_id
        assert stuck["producer"].startswith(f"pid {process.pid} on ")
        assert 0.0 < stuck["age_s"] < 60.0
        for call in (
            lambda: plane.client.kv_wait(partition, FINISHED, timeout=LATE_S),
            lambda: plane.client.kv_claim(
                partition, "train", count=1, where=FINISHED, timeout=LATE_S
            ),
        ):
            why = late(call)
            assert "'p7': running, unchanged for " in why
            assert f"last written by pid {process.pid} on " in why
            assert f"(client {client_id}): dead" in why


def test_a_group_whose_producer_was_killed_is_named_with_what_it_left(
    plane: Plane, partition: str
) -> None:
    with Process(run_a_group, plane.joined, plane.config, partition) as process:
        client_id = dies(plane, process, partition)
        where = {"status": "completed"}
        for call in (
            lambda: plane.client.kv_wait(partition, where, group_by="uid", timeout=LATE_S),
            lambda: plane.client.kv_claim(
                partition, "train", count=1, where=where, groups=True, timeout=LATE_S
            ),
        ):
            why = late(call)
            assert "0 of 1 groups are whole and match" in why
            assert "'B': running for " in why
            assert f"3 of 4 sessions, producer pid {process.pid} on " in why
            assert f"(client {client_id}): dead" in why


def test_a_producer_that_is_stopped_is_not_called_dead(plane: Plane, partition: str) -> None:
    with Process(write_a_prompt, plane.joined, plane.config, partition) as process:
        process.says()
        process.stop()
        [stuck] = plane.client.explain(partition, FINISHED).stuck
        assert stuck["alive"] is True


def test_a_consumer_that_was_killed_is_named_with_what_it_holds(
    plane: Plane, partition: str
) -> None:
    plane.client.kv_batch_put(["a", "b", "c"], partition, None, [{}, {}, {}])
    with Process(claim_two, plane.joined, plane.config, partition) as process:
        client_id = process.says()
        process.kill()

        def told() -> str:
            return plane.client.explain(partition, task="train", count=2).text

        eventually(lambda: f"(client {client_id}): dead" in told(), "its death is known")
        assert "3 of 3 rows match, 1 of them ready for task 'train'; 2 wanted" in told()
        assert "  2 rows in 1 claim since " in told()
        assert "offered again when its lease of 600 s is over" in told()


# -- servers that are silent -----------------------------------------------------------------


async def test_a_call_that_no_server_answered_says_which_one_did_not(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    plane.client.kv_put("a", "p", None, {"n": 1})
    async with AsyncClient(plane.joined, plane.config) as client:
        await client.attach()
        os.kill(plane.pid, signal.SIGSTOP)
        try:
            blocking = late(lambda: plane.client.kv_list("p", timeout=LATE_S))
            with pytest.raises(DeadlineExceeded) as error:
                await client.status(timeout=LATE_S)
        finally:
            os.kill(plane.pid, signal.SIGCONT)
    who = f"the tag store at {plane.joined.tags} has not answered"
    assert blocking.startswith(f"{who} 'list' for 0.5 s: it is stopped or overloaded")
    assert (error.value.explanation or "").startswith(f"{who} 'status' for 0.5 s")
