"""Nodes of a Ray cluster that die, each scenario with a cluster of its own: `python -m
tests.kills.nodes SCENARIO SETTINGS`, which prints what it has seen as a line of JSON.

All nodes are on this machine. So that they are as far from each other as nodes are, no process
takes the unix socket of another node's store for one of its own: they speak TCP, and map nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import ray as untyped_ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dataplane
from dataplane.client.connection import Connection
from dataplane.client.sync import Client
from dataplane.errors import DataplaneError, PlaneLost, ValueLost
from dataplane.fields import LOST, LOST_ROWS
from dataplane.host.ray.lookup import store_id_of
from dataplane.wire.address import Address
from tests.deadline import eventually

ray = cast("Any", untyped_ray)

P = "train"
MiB = 1 << 20
NAME = "nodes"
TAGS_NODE = "NODES_TEST_TAGS_NODE"
"""Variable with the id of the node that has the tag store; Ray hands it to all processes."""
DECLARED_S = 60.0
"""Within which Ray finds out that a node is dead: 15 s of its own checks, and some more."""
Said = dict[str, Any]


def keep_apart() -> None:
    """In a process of the cluster: unix sockets of other nodes cannot be seen from here."""
    exists = Address.is_here

    def is_here(self: Address) -> bool:
        if self.unix is None or not exists(self):
            return False
        mine = ray.get_runtime_context().get_node_id()
        name = Path(self.unix).name
        if name == "tags.sock":
            return mine == os.environ[TAGS_NODE]
        return name == f"{store_id_of(mine)}.sock"

    Address.is_here = is_here


@ray.remote(num_cpus=0)
class Far:
    """A process of another node with a client of its own."""

    def __init__(self, settings: Said) -> None:
        torch.set_num_threads(1)
        self._client = dataplane.init(settings, name=NAME)

    def pid(self) -> int:
        return os.getpid()

    def put(self, key: str, numel: int, *args: Any, **named: Any) -> None:
        fields = {"x": torch.arange(numel)} if numel else None
        self._client.kv_put(key, P, fields, *args, **named)

    def total(self, key: str, timeout: float) -> int:
        rows = self._client.kv_batch_get([key], P, layout="list", timeout=timeout)
        return int(rows.fields["x"][0].sum())

    def keys(self) -> list[str]:
        return self._client.kv_list(P).keys


class Nodes:
    """A cluster of two nodes, this process being on the first."""

    def __init__(self, settings: Said, *, tags_on_second: bool = False) -> None:
        memory = 80 * MiB  # the least that Ray takes
        arguments = {"num_cpus": 1, "object_store_memory": memory}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**arguments, "include_dashboard": False}
        )
        self.second: Any = self.cluster.add_node(**arguments)
        self.settings = {**settings, "host": "ray", "linger_s": 60, "start_timeout_s": 60}
        first = self.cluster.head_node.node_id
        os.environ[TAGS_NODE] = self.second.node_id if tags_on_second else first
        ray.init(
            address=self.cluster.address, log_to_driver=False, logging_level="error",
            runtime_env={
                "worker_process_setup_hook": "tests.kills.nodes.keep_apart",
                "env_vars": {TAGS_NODE: os.environ[TAGS_NODE]},
            },
        )  # fmt: skip
        keep_apart()
        self.cluster.wait_for_nodes()
        self.stores = [store_id_of(first), store_id_of(self.second.node_id)]
        self._declared: list[float] = []

    def far(self) -> Any:
        """A process of the second node."""
        pinned = NodeAffinitySchedulingStrategy(self.second.node_id, soft=False)
        far = Far.options(scheduling_strategy=pinned).remote(self.settings)
        ray.get(far.pid.remote(), timeout=90)
        return far

    def kill_second(self, *more: int) -> None:
        """The second node dies, all of its processes at once: also those named, which its raylet
        would have to look for."""
        pids = [
            process.process.pid for list_ in self.second.all_processes.values() for process in list_
        ]
        for pid in [*pids, *more]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        threading.Thread(target=self._see_it_dead, daemon=True).start()

    def kill_second_raylet(self) -> None:
        """Only the raylet of the second node dies."""
        (raylet,) = self.second.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        threading.Thread(target=self._see_it_dead, daemon=True).start()

    def _see_it_dead(self) -> None:
        while not self._declared:
            if not any(
                node["NodeID"] == self.second.node_id and node["Alive"] for node in ray.nodes()
            ):
                self._declared.append(time.monotonic())
            time.sleep(0.02)

    @property
    def declared(self) -> float | None:
        """When Ray said that the second node is dead."""
        return self._declared[0] if self._declared else None

    def actors(self, what: str) -> list[tuple[str, str]]:
        """State and node of the actors whose name has this in it."""
        found = ray._private.state.actors().values()
        return [
            (actor["State"], actor["Address"]["NodeID"]) for actor in found
            if what in (actor["Name"] or "")
        ]  # fmt: skip

    def end(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def store_of(client: Client, store_id: str) -> Said:
    """What a value store says of itself."""
    return client.status()["values"][store_id]


def failing(call: Callable[[], Any]) -> tuple[str, float, str]:
    """The kind of error that a call ends with, how long it took, and what it says."""
    began = time.monotonic()
    try:
        call()
        said = "answered", ""
    except DataplaneError as error:
        said = type(error).__name__, str(error)
    return said[0], time.monotonic() - began, said[1]


# -- scenarios -------------------------------------------------------------------------------


def values_node(nodes: Nodes) -> Said:
    """The node of a value store dies: silence at first, then rows are lost."""
    client = dataplane.init(nodes.settings, name=NAME)
    far = nodes.far()
    attempt = client.begin_group("g", P, n=2, declared_bytes=MiB)
    client.kv_put("g_0", P, {"x": torch.arange(10)}, {"uid": "g"}, attempt=attempt)
    ray.get(far.put.remote("g_1", 1000, {"uid": "g"}, attempt=attempt))
    ray.get(far.put.remote("alone", 100_000, {"n": 1}))
    client.kv_put("here", P, {"x": torch.arange(1000)})
    _, there = nodes.stores
    before = store_of(client, there)
    assert before["blocks"] == 2, before
    assert client.kv_batch_get(["alone"], P).keys == ["alone"]  # before, it can be read from here

    woken: list[Any] = []

    def waits() -> None:
        meta = client.kv_wait(P, {LOST: {"exists": True}}, count=2, timeout=90)
        woken.append((sorted(meta.keys), time.monotonic()))

    waiter = threading.Thread(target=waits)
    waiter.start()
    killed = time.monotonic()
    nodes.kill_second(before["pid"], ray.get(far.pid.remote()))

    def get(*keys: str, timeout: float = 2.0) -> tuple[str, float, str]:
        return failing(lambda: client.kv_batch_get(list(keys), P, timeout=timeout))

    silent: list[tuple[str, float]] = []
    while True:
        kind, took, text = get("alone", "g_1")
        if kind == ValueLost.__name__ or nodes.declared is not None:
            break
        silent.append((kind, took))
        assert time.monotonic() < killed + DECLARED_S, silent
        assert client.kv_batch_get(["here"], P).keys == ["here"]
    eventually(lambda: nodes.declared, "Ray declares the node dead")
    declared = nodes.declared
    assert declared is not None

    def lost() -> str:
        kind, _, said = get("alone", "g_1")
        return said if kind == ValueLost.__name__ else ""

    text = eventually(lost, "the rows are lost", within_s=10.0)
    lost_s = time.monotonic() - declared
    waiter.join(10)
    prompt = client.kv_list(P, where={"is_prompt": True}).tags[0]
    explained = str(client.explain(P, {"uid": "g"}, fields=["x"], group_by="uid", count=1))
    # Life goes on: of other rows, of new ones, and of the group in another attempt.
    for key in ("more", "alone"):
        if key == "alone":
            client.kv_clear(["alone"], P)
        client.kv_put(key, P, {"x": torch.arange(5)})
    again = client.begin_group("g", P, n=2, declared_bytes=MiB)
    client.kv_put("g_1", P, {"x": torch.arange(3)}, {"uid": "g"}, attempt=again)
    read = sorted(client.kv_batch_get(["here", "more", "alone", "g_1"], P).keys)
    states = nodes.actors(f"/{there}")
    client.kv_clear(None, P, where={}, retire=True)
    here = nodes.stores[0]
    eventually(
        lambda: not (store_of(client, here)["used_bytes"] or store_of(client, here)["blocks"]),
        "nothing is in use",
    )
    status = client.status()
    client.close(destroy=True)
    return {
        "silent": sorted({kind for kind, _ in silent}), "longest_s": max(t for _, t in silent),
        "gets": len(silent), "declared_s": declared - killed, "lost_s": lost_s, "text": text,
        "woken": woken[0][0], "woken_s": woken[0][1] - declared, "lost_rows": prompt.get(LOST_ROWS),
        "explained": explained, "read": read, "stores": list(status["values"]) == [here],
        "bytes_in_use": status["bytes_in_use"], "dead_blocks": status["dead_blocks"],
        "held_bytes": status["values"][here]["held_bytes"],
        "elsewhere": [node for state, node in states if state == "ALIVE"],
    }  # fmt: skip


def read_from_a_dead_raylet(nodes: Nodes) -> Said:
    """In the middle of a large read from a node its raylet is killed, and nothing else."""
    return _large_read(nodes, lambda pid: nodes.kill_second_raylet())


def read_from_a_dead_node(nodes: Nodes) -> Said:
    """In the middle of a large read from a node all of it dies."""
    return _large_read(nodes, lambda pid: nodes.kill_second(pid))


def _large_read(nodes: Nodes, kill: Callable[[int], None]) -> Said:
    client = dataplane.init(nodes.settings, name=NAME)
    far = nodes.far()
    ray.get(far.put.remote("large", 32 * MiB))
    pid = store_of(client, nodes.stores[1])["pid"]
    more = Connection._more
    read = 0
    begun = threading.Event()

    def slowly(self: Connection, view: memoryview, deadline: float) -> int:
        nonlocal read
        if len(view) < MiB:
            return more(self, view, deadline)
        got = more(self, view[: 2 * MiB], deadline)
        read += got
        if read > 32 * MiB:
            begun.set()
            time.sleep(0.3)
        return got

    Connection._more = slowly
    outcome: list[tuple[str, float, str]] = []
    deadline_s = 8.0

    def get() -> None:
        outcome.append(failing(lambda: client.kv_batch_get(["large"], P, timeout=deadline_s)))

    reader = threading.Thread(target=get)
    reader.start()
    assert begun.wait(deadline_s)
    kill(pid)
    reader.join(2 * deadline_s)
    kind, took, text = outcome[0]
    Connection._more = more
    eventually(lambda: nodes.declared, "Ray declares the node dead", within_s=DECLARED_S)

    def lost() -> bool:
        return failing(lambda: client.kv_batch_get(["large"], P, timeout=2))[0] == "ValueLost"

    eventually(lost, "the row is lost")
    client.close(destroy=True)
    return {"kind": kind, "took": took, "deadline": deadline_s, "text": text, "read": read}


def tags_node(nodes: Nodes) -> Said:
    """The node of the tag store dies, and the plane with it; a checkpoint is a new plane."""
    far = nodes.far()  # starts the plane, which is where its tag store is from then on
    client = dataplane.connect(NAME, config=nodes.settings)
    ray.get(far.put.remote("there", 1000, {"n": 1}))
    client.kv_put("here", P, {"x": torch.arange(100_000)}, {"n": 2})
    folder = tempfile.mkdtemp(prefix="dataplane-")
    client.save_checkpoint(f"{folder}/saved")
    status = client.status()
    here, there = nodes.stores
    mine = status["values"][here]["pid"]
    killed = time.monotonic()
    nodes.kill_second(status["pid"], status["values"][there]["pid"], ray.get(far.pid.remote()))
    calls: dict[str, Callable[[], Any]] = {
        "list": lambda: client.kv_list(P, timeout=2),
        "get": lambda: client.kv_batch_get(["here"], P, timeout=2),
        "put": lambda: client.kv_put("more", P, {"x": torch.arange(3)}, timeout=2),
        "wait": lambda: client.kv_wait(P, {"never": 1}, timeout=2),
    }
    before: list[tuple[str, float]] = []
    lost_s: dict[str, float] = {}
    for name, call in calls.items():
        while name not in lost_s:
            kind, took, _ = failing(call)
            if kind == PlaneLost.__name__:
                lost_s[name] = time.monotonic() - killed
            else:
                before.append((kind, took))
            assert time.monotonic() < killed + DECLARED_S, (name, before)
    eventually(lambda: nodes.declared, "Ray declares the node dead", within_s=DECLARED_S)
    eventually(lambda: not Path(f"/proc/{mine}").exists(), "the other value store ends as well")
    os.environ[TAGS_NODE] = nodes.cluster.head_node.node_id
    began = time.monotonic()
    other = dataplane.init(nodes.settings, name=NAME)
    other.load_checkpoint(f"{folder}/saved")
    restored_s = time.monotonic() - began
    rows = other.kv_batch_get(["there", "here"], P, layout="list")
    totals = [int(row.sum()) for row in rows.fields["x"]]
    same = other.plane_id == client.plane_id
    old = failing(lambda: client.kv_list(P, timeout=2))[0]
    other.close(destroy=True)
    declared = nodes.declared
    assert declared is not None
    return {
        "before": sorted({kind for kind, _ in before}), "longest_s": max(t for _, t in before),
        "declared_s": declared - killed, "lost_s": lost_s, "restored_s": restored_s,
        "totals": totals, "same": same, "old": old,
    }  # fmt: skip


def tags_again(nodes: Nodes) -> Said:
    """The tag store is killed, and its port is taken meanwhile: those of the other node find it."""
    client = dataplane.init(nodes.settings, name=NAME)
    far = nodes.far()
    ray.get(far.put.remote("there", 1000))
    client.kv_put("here", P, {"x": torch.arange(1000)})
    status = client.status()
    there = status["values"][nodes.stores[1]]["pid"]
    described = ray.get(ray.get_actor(f"{NAME}/tags", namespace="dataplane").describe.remote(5))
    host, port = described["address"][1]
    found = status["pid"]
    os.kill(found, signal.SIGKILL)
    with Stranger(host, port) as stranger:
        killed = time.monotonic()
        ray.get(far.put.remote("more", 1000, timeout=30.0))
        back_s = time.monotonic() - killed
        keys = sorted(ray.get(far.keys.remote()))
        total = ray.get(far.total.remote("here", 10.0))
        mine = [int(x.sum()) for x in client.kv_batch_get(["there"], P, layout="list").fields["x"]]
        again = client.status()
        described = ray.get(ray.get_actor(f"{NAME}/tags", namespace="dataplane").describe.remote(5))
        strangers = stranger.callers
    port_now = described["address"][1][1]
    client.kv_clear(None, P, where={})
    eventually(
        lambda: not any(v["used_bytes"] for v in client.status()["values"].values()),
        "nothing is in use on either node",
    )
    client.close(destroy=True)
    return {
        "back_s": back_s, "callers": strangers, "keys": keys, "totals": [total, *mine],
        "another_process": again["pid"] != found, "another_port": port_now != port,
        "same_value_store": again["values"][nodes.stores[1]].get("pid") == there,
        "revision": [status["revision"], again["revision"]],
    }  # fmt: skip


class Stranger:
    """Something else that listens where a tag store did, and hangs up on whoever calls."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: self._bound(host, port), "the port is taken")
        self._socket.listen()
        self.callers = 0
        self._thread = threading.Thread(target=self._hang_up)

    def _bound(self, host: str, port: int) -> bool:
        try:
            self._socket.bind((host, port))
        except OSError:
            return False
        return True

    def _hang_up(self) -> None:
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()
                self.callers += 1

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


SCENARIOS: dict[str, Callable[[Nodes], Said]] = {
    scenario.__name__: scenario
    for scenario in (
        values_node,
        read_from_a_dead_raylet,
        read_from_a_dead_node,
        tags_node,
        tags_again,
    )
}


def main() -> None:
    scenario = SCENARIOS[sys.argv[1]]
    nodes = Nodes(json.loads(sys.argv[2]), tags_on_second=scenario is tags_node)
    try:
        said = scenario(nodes)
    finally:
        nodes.end()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
