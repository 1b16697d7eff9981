"""The controller as Ray's actor: killed between two claims, it comes back and knows everything."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dataplane import compat
from dataplane.host import embedded
from tests.deadline import eventually

if compat.folder() not in sys.path:
    sys.path.insert(0, compat.folder())

import transfer_queue as tq
from transfer_queue.instance import ACTOR, NAMESPACE

pytestmark = [pytest.mark.ray, pytest.mark.faults]

DEADLINE_S = 60.0


@pytest.fixture
def config(ray_cluster: list[str], runtime_dir: Path) -> Iterator[Any]:
    """The settings of an instance whose claims wait."""
    stored = tq.init(
        {
            "dataplane": {
                "runtime_dir": str(runtime_dir), "start_timeout_s": DEADLINE_S,
                "timeout_s": DEADLINE_S, "wait_timeout_s": DEADLINE_S, "linger_s": 5.0,
                "capacity_bytes": 64 << 20, "segment_bytes": 16 << 20,
            }
        }
    )  # fmt: skip
    folder = runtime_dir / tq.get_client().link.joined.plane_id
    yield stored
    tq.close()
    eventually(lambda: not folder.exists(), "the plane ends with its instance")


def put(keys: list[str]) -> None:
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.arange(len(keys))}, batch_size=len(keys)))


def claim(count: int) -> list[str | None]:
    client = tq.get_client()
    meta = client.get_meta(["x"], count, "p", task_name="t")
    return client.kv_retrieve_keys(meta.global_indexes, "p")


def test_a_controller_that_is_killed_loses_nothing_and_hands_out_nothing_twice(
    config: Any,
) -> None:
    import ray

    actor = ray.get_actor(ACTOR, namespace=NAMESPACE)

    def pid_of() -> int:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=DEADLINE_S)

    put(["a", "b", "c"])
    assert claim(2) == ["a", "b"]
    before = tq.get_client().get_meta(["x"], 1, "p", mode="force_fetch").global_indexes
    with ThreadPoolExecutor(1) as pool:
        # One claim is under way when it happens, and does not end with the controller.
        late = pool.submit(claim, 2)
        killed = pid_of()
        os.kill(killed, signal.SIGKILL)
        assert tq.kv_list("p") == {"p": {"a": {}, "b": {}, "c": {}}}
        put(["d"])  # without a controller
        assert late.result(DEADLINE_S) == ["c", "d"]
    assert tq.get_client().check_consumption_status("t", "p") is True
    assert pid_of() != killed
    put(["e"])
    assert claim(1) == ["e"]
    after = tq.get_client().get_meta(["x"], 1, "p", mode="force_fetch").global_indexes
    assert after[:3] == before
    assert len(set(after)) == 5
    assert ray.get(actor.get_config.remote(), timeout=DEADLINE_S) == config
    assert ray.get(actor.list_partitions.remote(), timeout=DEADLINE_S) == ["p"]
    snapshot = ray.get(actor.get_partition_snapshot.remote("p"), timeout=DEADLINE_S)
    assert snapshot.keys_mapping == dict(zip("abcde", after, strict=True))
    # The plane can be joined by its address without Ray, and is found by its name through Ray only.
    link = tq.get_client().link
    assert embedded.attach(link.joined.name, link.config) is None
    ray.get(actor.clear_partition.remote("p"), timeout=DEADLINE_S)
    assert tq.kv_list() == {}
