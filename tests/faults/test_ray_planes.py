"""Planes that Ray hosts: who outlives whom, and what is said when an actor is killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane.client.aio import AsyncClient
from dataplane.client.sync import Client
from dataplane.errors import (
    DeadlineExceeded,
    PlaneLost,
    QuotaExceeded,
    StaleWrite,
    Unreachable,
)
from tests.deadline import eventually
from tests.faults.planes import MiB
from tests.faults.processes import is_gone
from tests.faults.raw import Raw, block, meta
from tests.faults.test_silence import VERBS
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.faults]

SMALL = {"x": torch.tensor([1, 2, 3])}
LARGE = {"x": torch.arange(100_000)}
_numbers = itertools.count(1)

Init = Callable[..., Client]


@pytest.fixture
def init(ray_cluster: list[str], plane_settings: dict[str, Any]) -> Generator[Init]:
    """Starts or attaches; every plane that it named is destroyed at the end and leaves nothing."""
    import ray

    clients: list[Client] = []

    def start(name: str, **settings: Any) -> Client:
        client = dataplane.init({**plane_settings, "timeout_s": 20, **settings}, name=name)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close(destroy=True)
    dataplane.close()
    ids = {client.plane_id for client in clients}
    names = {client.name for client in clients}

    def left() -> list[str]:
        actors = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["name"].partition("/")[0] in names
        ]
        runtime = os.listdir(plane_settings["runtime_dir"])
        shm = os.listdir("/dev/shm")
        return actors + [name for name in runtime + shm if any(i in name for i in ids)]

    eventually(lambda: not left(), "the planes leave no actor and no file")


@pytest.fixture
def name() -> str:
    """A name that no other plane has."""
    return f"faults-{os.getpid()}-{next(_numbers)}"


def pids(client: Client) -> tuple[int, int]:
    """Processes of the tag store and of the one value store, which may be being started again."""
    return client.status()["pid"], eventually(lambda: counts(client).get("pid"), "it is back")


def counts(client: Client) -> dict[str, Any]:
    (values,) = client.status()["values"].values()
    return values


def comes_to(client: Client, **wanted: int) -> None:
    eventually(
        lambda: wanted.items() <= counts(client).items(),
        f"the value store has {wanted}",
    )


def ray_kill(name: str, which: str) -> None:
    import ray

    (found,) = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"{name}/{which}")
    ]
    ray.kill(ray.get_actor(found, namespace="dataplane"), no_restart=True)


# -- a killed actor --------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tags", "values"])
def test_every_verb_rides_through_the_death_of_a_store(init: Init, name: str, which: str) -> None:
    client = init(name)
    client.kv_put("A", "p", LARGE)
    for verb in VERBS.values():
        verb(client, None)
    before = pids(client)
    for name_ in ("put tags", "get"):
        os.kill(pids(client)[which == "values"], signal.SIGKILL)
        began = time.monotonic()
        VERBS[name_](client, None)
        assert time.monotonic() - began < 10, name_
    for verb in VERBS.values():
        verb(client, None)
    after = pids(client)
    assert [old != new for old, new in zip(before, after, strict=True)] == [
        which == "tags", which == "values",
    ]  # fmt: skip
    rows = client.kv_batch_get(["A"], "p", layout="list")
    assert torch.equal(rows.fields["x"][0], LARGE["x"])
    client.kv_clear(None, "p", where={})
    comes_to(client, used_bytes=0, blocks_reserved=0, pins=0, waiting=0)


def test_a_tag_store_that_is_ended_for_good_is_a_lost_plane_and_takes_its_value_store_along(
    init: Init, name: str, plane_settings: dict[str, Any]
) -> None:
    client = init(name)
    client.kv_put("A", "p", LARGE)
    for verb in VERBS.values():
        verb(client, None)
    tags, values = pids(client)
    ray_kill(name, "tags")
    eventually(lambda: is_gone(tags), "the tag store's process is dead")
    for name_, verb in VERBS.items():
        began = time.monotonic()
        with pytest.raises(PlaneLost, match=name):
            verb(client, None)
        assert time.monotonic() - began < 4, name_
    eventually(lambda: is_gone(values), "the value store ends with its plane")
    eventually(
        lambda: not (Path(plane_settings["runtime_dir"]) / client.plane_id).exists(),
        "the value store removes what the tag store left",
    )
    # The name is free: another plane can have it, and old clients do not take it for theirs.
    again = init(name)
    assert again.plane_id != client.plane_id
    again.kv_put("A", "p", SMALL)
    with pytest.raises(PlaneLost):
        client.kv_list("p")


def test_a_value_store_that_is_ended_for_good_is_started_by_the_next_client_of_its_node(
    init: Init, name: str
) -> None:
    client = init(name)
    client.kv_put("A", "p", LARGE)
    _, values = pids(client)
    ray_kill(name, "values")
    eventually(lambda: is_gone(values), "the value store's process is dead")
    for verb in ("put small", "put large", "get", "view"):
        began = time.monotonic()
        with pytest.raises((Unreachable, dataplane.OutcomeUnknown)):
            VERBS[verb](client, 0.5)
        assert time.monotonic() - began < 2, verb
    assert client.kv_list("p").keys == ["A"]
    again = init(name)
    assert again.plane_id == client.plane_id
    for either in (again, client):
        rows = either.kv_batch_get(["A"], "p", layout="list")
        assert torch.equal(rows.fields["x"][0], LARGE["x"])


@pytest.mark.parametrize("which", ["tags", "values"])
def test_calls_under_way_go_on_at_the_store_that_comes_next(
    init: Init, name: str, which: str
) -> None:
    client = init(name, capacity_bytes=8 * MiB, segment_bytes=4 * MiB)
    for key in "AB":
        client.kv_put(key, "full", {"x": torch.zeros(4 * MiB - 4160, dtype=torch.uint8)})
    asyncio_client = AsyncClient(client._core.joined, client._core.config)
    failed: list[BaseException] = []

    def blocking() -> None:
        try:
            client.kv_put("C", "p", LARGE, timeout=60)
        except Exception as error:
            failed.append(error)

    async def coroutine() -> None:
        try:
            await asyncio_client.kv_put("D", "p", LARGE, timeout=60)
        except Exception as error:
            failed.append(error)
        await asyncio_client.close()

    threads = [
        threading.Thread(target=blocking),
        threading.Thread(target=lambda: asyncio.run(coroutine())),
    ]
    for thread in threads:
        thread.start()
    comes_to(client, waiting=2)
    os.kill(pids(client)[which == "values"], signal.SIGKILL)
    comes_to(client, waiting=2)
    client.kv_clear(["A", "B"], "full")
    for thread in threads:
        thread.join(20)
    assert failed == []
    rows = client.kv_batch_get(["C", "D"], "p", layout="list")
    assert all(torch.equal(x, LARGE["x"]) for x in rows.fields["x"])


def test_a_stopped_plane_survives_a_client_that_gives_up_attaching(
    init: Init, name: str, plane_settings: dict[str, Any]
) -> None:
    client = init(name)
    client.kv_put("A", "p", SMALL)
    tags, _ = pids(client)
    impatient = {**plane_settings, "start_timeout_s": 0.5, "timeout_s": 0.5}
    os.kill(tags, signal.SIGSTOP)
    try:
        for join in (dataplane.init, dataplane.connect):
            with pytest.raises((DeadlineExceeded, dataplane.Unreachable)):
                join(name=name, config=impatient)
    finally:
        os.kill(tags, signal.SIGCONT)
    assert client.kv_list("p").keys == ["A"]
    assert init(name).plane_id == client.plane_id


# -- starting and attaching ------------------------------------------------------------------

DRIVER = """
import json, sys
import ray, torch, dataplane
settings = json.loads(sys.argv[3])
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
client = dataplane.init(settings, name=sys.argv[2])
client.kv_put("A", "p", {"x": torch.arange(100_000)}, {"by": "driver"})
print(client.plane_id)
"""


def test_a_plane_outlives_the_driver_that_started_it(
    init: Init, name: str, plane_settings: dict[str, Any], ray_cluster: list[str]
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, address, name, json.dumps(plane_settings)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    client = init(name)
    assert client.plane_id == done.stdout.split()[-1]
    assert client.kv_list("p").tags == [{"by": "driver"}]
    rows = client.kv_batch_get(["A"], "p", layout="list")
    assert torch.equal(rows.fields["x"][0], LARGE["x"])
    connected = dataplane.connect(name, config=plane_settings)
    assert connected.plane_id == client.plane_id
    connected.close()


def test_planes_of_two_names_know_nothing_of_each_other(init: Init, name: str) -> None:
    one, two = init(name), init(f"{name}-two")
    assert one.plane_id != two.plane_id
    one.kv_put("A", "p", SMALL, {"of": 1})
    two.kv_put("A", "p", LARGE, {"of": 2})
    assert one.kv_list("p").tags == [{"of": 1}]
    assert two.kv_list("p").tags == [{"of": 2}]
    one.close(destroy=True)
    assert two.kv_batch_get(["A"], "p").keys == ["A"]


def test_a_plane_that_was_destroyed_can_be_started_again_at_once(init: Init, name: str) -> None:
    ids = set[str]()
    for _ in range(3):
        client = init(name)
        client.kv_put("A", "p", SMALL)
        assert client.kv_list("p").keys == ["A"]
        ids.add(client.plane_id)
        client.close(destroy=True)
    assert len(ids) == 3


def test_starters_that_race_meet_in_one_plane(
    init: Init, name: str, plane_settings: dict[str, Any]
) -> None:
    import ray

    @ray.remote(num_cpus=0.1)
    class Starter:
        def ready(self) -> None:
            pass

        def start(self, number: int) -> str:
            import dataplane

            client = dataplane.init(plane_settings, name=name)
            client.kv_put(f"k{number}", "p", None, {"n": number})
            return client.plane_id

    starters = [Starter.remote() for _ in range(4)]
    ray.get([starter.ready.remote() for starter in starters])
    ids = ray.get([starter.start.remote(i) for i, starter in enumerate(starters)], timeout=60)
    client = init(name)
    assert set(ids) == {client.plane_id}
    assert sorted(client.kv_list("p").keys) == ["k0", "k1", "k2", "k3"]
    for starter in starters:
        ray.kill(starter)


def test_attaching_never_creates(ray_cluster: list[str], plane_settings: dict[str, Any]) -> None:
    import ray

    with pytest.raises(PlaneLost, match="no plane 'nobody' runs on this Ray cluster"):
        dataplane.connect("nobody", config=plane_settings)
    assert not [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("nobody")
    ]


def test_a_plane_without_clients_ends_after_it_has_lingered(
    init: Init, name: str, plane_settings: dict[str, Any]
) -> None:
    client = init(name, linger_s=0.5)
    client.kv_put("A", "p", SMALL)
    processes = pids(client)
    client.close()
    eventually(lambda: all(map(is_gone, processes)), "both stores end by themselves")
    with pytest.raises(PlaneLost):
        dataplane.connect(name, config=plane_settings)


# -- across two processes --------------------------------------------------------------------


def test_a_small_put_whose_payload_comes_after_the_clear_is_stale(init: Init, name: str) -> None:
    """The head of the put is with the value store, the clear with the tag store."""
    client = init(name)
    client.kv_put("B", "p", SMALL)
    used = counts(client)["used_bytes"]
    (store,) = client._core.stores.values()
    joined = replace(client._core.joined, tags=store.address)
    head, payload = block(SMALL)
    with Raw.greeted(joined) as raw, Raw.greeted(joined) as other:
        for number in range(1, 21):
            client.kv_put("A", "p", None, {"n": number})
            packed = meta("p", ["A"], number)
            put = raw.request("put_block", [packed, None, *head, 5.0, None], len(payload))
            raw.number = number
            eventually(lambda: counts(client)["used_bytes"] > used, "the head has arrived")
            # The tag store hears of it on the connection that this asks for a stamp.
            other.ask("abort", [other.ask("reserve", [4096, 5.0, None])[0]])
            client.kv_clear(["A"], "p")
            raw.send(payload)
            with pytest.raises(StaleWrite) as refused:
                raw.answer(put)
            assert (refused.value.keys, refused.value.cleared_at) == (["A"], client.revision.n)
            comes_to(client, used_bytes=used)
    assert client.kv_list("p").keys == ["B"]


def test_mostly_dead_blocks_are_repacked_across_the_two_stores(init: Init, name: str) -> None:
    client = init(name, capacity_bytes=8 * MiB, segment_bytes=4 * MiB)
    rows = 16
    left: dict[str, torch.Tensor] = {}
    for number in range(6):
        keys = [f"b{number}-{i}" for i in range(rows)]
        x = torch.randint(0, 256, (rows, 64 << 10), dtype=torch.uint8)
        client.kv_batch_put(keys, "p", {"x": x})
        left[keys[3]] = x[3]
    with pytest.raises(QuotaExceeded):
        client.kv_put("large", "q", {"x": torch.zeros(2 * MiB, dtype=torch.uint8)}, timeout=2.0)
    client.kv_clear([k for k in client.kv_list("p").keys if k not in left], "p")
    before = client.kv_list("p").revision
    client.kv_put("large", "q", {"x": torch.zeros(3 * MiB, dtype=torch.uint8)})
    assert client.kv_list("p").revision == before
    assert len(client.kv_list("p", since=before)) == 0
    got = client.kv_batch_get(list(left), "p", layout="list").fields["x"]
    assert all(torch.equal(a, b) for a, b in zip(got, left.values(), strict=True))
    for partition in "pq":
        client.kv_clear(None, partition, where={})
    comes_to(client, used_bytes=0, blocks=0)


# -- clusters of their own -------------------------------------------------------------------

SPECIAL = """
import json, os, signal, sys, time
import ray, torch
import dataplane
from dataplane.errors import PlaneLost
from tests.deadline import eventually

settings = json.loads(sys.argv[1])
runtime, shm = settings["runtime_dir"], settings["shm_dir"]

def start_ray():
    ray.init(
        address="local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )

def folders():
    return sorted(name for root in (runtime, shm) for name in os.listdir(root) if name != "lock")

start_ray()

@ray.remote(num_cpus=1)
class Busy:
    def works(self):
        return True

busy = Busy.remote()
assert ray.get(busy.works.remote())
eventually(lambda: not ray.available_resources().get("CPU", 0), "the cluster is busy")
began = time.monotonic()
client = dataplane.init(settings, name="one-cpu")
took = time.monotonic() - began
client.kv_put("A", "p", {"x": torch.arange(100_000)}, {"n": 1})
assert client.kv_batch_get(["A"], "p", layout="list").fields["x"][0].sum() == 4999950000
first, old = client.plane_id, folders()
ray.shutdown()

try:
    client.kv_list("p", timeout=5)
    stale_client = "answered"
except PlaneLost:
    stale_client = "PlaneLost"
start_ray()
try:
    dataplane.connect("one-cpu", config=settings)
    attached = "attached"
except PlaneLost:
    attached = "PlaneLost"
again = dataplane.init(settings, name="one-cpu")
second, new = again.plane_id, folders()
listed = None
try:
    again.kv_list("p")
except dataplane.PartitionNotFound:
    listed = "PartitionNotFound"
again.close(destroy=True)
eventually(lambda: not folders(), "the plane leaves nothing")
ray.shutdown()
print(json.dumps({
    "took": took, "stale_client": stale_client, "attached": attached, "listed": listed,
    "same": first == second, "old": [first in name for name in old],
    "old_left": [name for name in new if first in name], "left": folders(),
}))
"""


@pytest.mark.slow
def test_on_a_busy_1_cpu_cluster_with_tokens_it_starts_and_takes_no_earlier_sessions_plane(
    tmp_path: Path,
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dataplane-") as runtime,
        tempfile.TemporaryDirectory(prefix="dataplane-", dir="/dev/shm") as shm,
    ):
        settings = {
            "runtime_dir": runtime, "shm_dir": shm, "capacity_bytes": 16 * MiB, "linger_s": 60,
        }  # fmt: skip
        environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64,
        }  # fmt: skip
        environment.pop("RAY_ADDRESS", None)  # of the session's cluster
        done = subprocess.run(
            [sys.executable, "-c", SPECIAL, json.dumps(settings)],
            capture_output=True, text=True, timeout=100, env=environment, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("took") < 15
    assert said == {
        "stale_client": "PlaneLost", "attached": "PlaneLost", "listed": "PartitionNotFound",
        "same": False, "old": [True, True], "old_left": [], "left": [],
    }  # fmt: skip
