"""The controller over a plane without Ray: claims, waits, restarts, who may do what."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import (
    BatchMeta,
    GRPOGroupNSampler,
    RankAwareSampler,
    TransferQueueClient,
)
from transfer_queue.names import HIDDEN, KEYLESS, RESERVED_TAG
from transfer_queue.sampler import BaseSampler

from dataplane import compat
from dataplane.config import Config
from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PartitionNotFound,
    Unreachable,
)
from dataplane.host import embedded
from tests.dataplane.compat.instances import WAIT_S, Make, data, name, put
from tests.deadline import eventually

# -- claims ----------------------------------------------------------------------------------


def test_rows_are_claimed_once_by_whoever_asks_at_the_same_time(instance: Make) -> None:
    one = instance()
    p = name()
    clients = [one.client, one.join(), one.join()]
    made = one.client.put(data(60), partition_id=p)

    def claim(at: int) -> list[int]:
        return clients[at % 3].get_meta(["x"], 3, p, task_name="t").global_indexes

    with ThreadPoolExecutor(6) as pool:
        got = [index for part in pool.map(claim, range(20)) for index in part]
    assert sorted(got) == made.global_indexes


def test_a_controller_that_is_started_again_knows_who_consumed_what(instance: Make) -> None:
    one = instance()
    p = name()
    put(one.client, p, ["a", "b", "c"], x=torch.arange(3))
    first = one.client.get_meta(["x"], 1, p, task_name="t")
    before = one.client.get_meta(["x"], 1, p, mode="force_fetch").global_indexes
    one.restart()
    second = one.client.get_meta(["x"], 2, p, task_name="t")
    assert one.client.kv_retrieve_keys(first.global_indexes + second.global_indexes, p) == [
        "a", "b", "c",
    ]  # fmt: skip
    assert first.global_indexes + second.global_indexes == before
    assert one.client.get_meta(["x"], 1, p, task_name="t").size == 0
    one.client.clear_partition(p)
    one.restart()
    new = one.client.put(data(2), partition_id=p)
    assert min(new.global_indexes) > max(before)


def test_a_claim_whose_answer_was_lost_is_given_the_same_rows(instance: Make) -> None:
    one = instance()
    p = name()
    one.client.put(data(4), partition_id=p)

    def claim(request: str, again: bool) -> list[int]:
        body = [p, ["x"], 2, "t", {}, 1.0, request, again]
        ask = one.client.controller.ask
        return one.client.link.run(lambda core, deadline: ask(core, "fetch", body, deadline))[0]

    got = claim("r1", False)
    one.restart()
    assert claim("r1", True) == got
    assert set(claim("r2", True)).isdisjoint(got)


def test_replicas_get_the_same_rows_also_from_a_controller_that_is_started_again(
    instance: Make,
) -> None:
    one = instance(sampler=RankAwareSampler)
    p = name()
    made = one.client.put(data(6), partition_id=p).global_indexes

    def claim(rank: int, batch: int) -> list[int]:
        return one.client.get_meta(
            ["x"], 2, p, task_name="t", sampling_config={"dp_rank": rank, "batch_index": batch}
        ).global_indexes

    assert claim(0, 0) == claim(0, 0) == made[:2]
    one.restart()
    assert claim(0, 0) == made[:2]
    assert claim(1, 0) == made[2:4]
    # Rows that were cleared since are not what anybody can have.
    one.client.clear_samples(BatchMeta(made[2:3], [p]))
    assert claim(1, 0) == made[4:6]
    assert claim(0, 1) == []


def test_a_sampler_that_fails_says_so_to_who_asked(instance: Make) -> None:
    client = instance(sampler=lambda: GRPOGroupNSampler(n_samples_per_prompt=3)).client
    p = name()
    client.put(data(4), partition_id=p)
    with pytest.raises(ValueError, match="multiple of n_samples_per_prompt"):
        client.get_meta(["x"], 4, p, task_name="t")
    assert client.get_meta(["x"], 3, p, task_name="t").size == 3
    with pytest.raises(InvalidRequest, match="mode"):
        client.get_meta(["x"], 4, p, mode="steal")
    with pytest.raises(ValueError, match="task_name"):
        client.get_meta(["x"], 4, p)


class Chooser(BaseSampler):
    """A sampler as users write them: it knows rows by their keys, and something happens first."""

    def __init__(self, first: Callable[[], None]) -> None:
        super().__init__()
        self.first = first
        self.saw: list[Any] = []

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        partition = kwargs["partition"]
        self.saw.append((kwargs["task_name"], kwargs["partition_id"], kwargs["dp_rank"]))
        self.first()
        keys = dict(zip(partition.kv_retrieve_keys(ready_indexes), ready_indexes, strict=True))
        tags = partition.get_custom_meta(ready_indexes)
        wanted = sorted(keys, key=lambda key: -tags[keys[key]]["at"])[:batch_size]
        chosen = [keys[key] for key in wanted]
        return chosen, ready_indexes


def test_a_users_sampler_chooses_by_tags_and_consumes_more_than_it_hands_out(
    plane: tuple[embedded.EmbeddedHost, Config], instance: Make
) -> None:
    p = name()
    cleared: list[str] = ["c"]

    def clear() -> None:
        while cleared:  # a row goes just when it was chosen
            one.client.link.sync.kv_clear([cleared.pop()], p)

    chooser = Chooser(clear)
    one = instance(sampler=lambda: chooser)
    put(one.client, p, ["a", "b", "c"], x=torch.arange(3))
    config = {"dp_rank": torch.tensor(3)}
    meta = one.client.get_meta(
        ["x"],
        torch.tensor(1),
        p,
        task_name="t",
        sampling_config=config,  # pyright: ignore[reportArgumentType]
    )
    assert one.client.kv_retrieve_keys(meta.global_indexes, p) == ["b"]
    assert chooser.saw == [("t", p, 3)] * 2
    assert one.client.check_consumption_status("t", p) is True


def test_rows_given_out_ahead_are_waited_for(instance: Make) -> None:
    client = instance(ahead=4).client
    p = name()
    first = client.put(data(1), partition_id=p).global_indexes
    client.get_meta(["x"], 1, p, task_name="t")
    indexes, flags = client.get_consumption_status("t", p)
    assert indexes is not None
    assert flags is not None
    assert len(indexes) == 4
    assert flags.tolist() == [1, 0, 0, 0]
    everything = client.get_meta(["x"], 1, p, mode="force_fetch")
    assert everything.production_status.tolist() == [1, 0, 0, 0]
    more = client.put(data(5), partition_id=p).global_indexes
    assert [*first, *more][:4] == indexes.tolist()
    assert client.get_meta(["x"], 5, p, task_name="t").size == 5
    assert client.check_consumption_status("t", p) is True


# -- waiting ---------------------------------------------------------------------------------


def test_a_claim_waits_for_rows_and_delays_nobody(instance: Make) -> None:
    one = instance(polling_mode=False)
    p, q = name(), name()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(one.client.get_meta, ["x"], 3, p, task_name="t")
        eventually(lambda: one.server.service.mirrors.waiting, "the claim waits")
        made = one.client.put(data(2), partition_id=p).global_indexes
        assert one.client.put(data(1), partition_id=q).size == 1
        assert one.client.get_meta(["x"], 1, q, task_name="t").size == 1
        assert one.client.get_meta(["x"], 2, p, task_name="u").global_indexes == made
        assert not late.done()
        one.client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), partition_id=p)
        (third,) = one.client.put(data(1), partition_id=p).global_indexes
        assert late.result(WAIT_S).global_indexes == [*made, third]


def test_a_wait_ends_at_its_deadline_and_says_what_is_missing(instance: Make) -> None:
    one = instance(polling_mode=False)
    client = one.join(wait_timeout_s=0.2)
    p = name()
    with pytest.raises(DeadlineExceeded, match="no partition"):
        client.get_meta(["x"], 2, p, task_name="t")
    client.put(data(1), partition_id=p)
    with pytest.raises(DeadlineExceeded, match="1 of 2 rows are ready, of 1"):
        client.get_meta(["x"], 2, p, task_name="t")
    assert not one.server.service.mirrors.waiting
    assert client.get_meta(["x"], 1, p, task_name="t").size == 1


def test_a_claim_outlasts_a_controller_that_is_started_again(instance: Make) -> None:
    one = instance(polling_mode=False)
    p = name()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(one.client.get_meta, ["x"], 1, p, task_name="t")
        eventually(lambda: one.server.service.mirrors.waiting, "the claim waits")
        one.restart()
        put(one.client, p, ["k"], x=torch.arange(1))
        assert one.client.kv_retrieve_keys(late.result(WAIT_S).global_indexes, p) == ["k"]


def test_a_controller_that_is_gone_is_an_error_in_time_and_puts_go_on(instance: Make) -> None:
    one = instance()
    p = name()
    one.client.put(data(1), partition_id=p)
    one.server.stop()
    impatient = one.join(timeout_s=0.3)
    with pytest.raises(Unreachable, match="TransferQueueController"):
        impatient.get_consumption_status("t", p)
    put(impatient, p, ["k"], x=torch.arange(1))
    assert impatient.kv_list(p)[p]["k"]["at"] == 0
    one.start()


# -- other places ----------------------------------------------------------------------------


def test_coroutines_on_several_loops_and_threads_do_the_same(instance: Make) -> None:
    client = instance().client
    p = name()

    async def work(task: str) -> list[int]:
        meta = await client.async_put(data(2), partition_id=p)
        values = await client.async_get_data(meta)
        assert values["x"].tolist() == [0, 1]
        parts = await asyncio.gather(
            *[client.async_get_meta(["x"], 1, p, task_name=task) for _ in range(2)]
        )
        keys = await client.async_kv_retrieve_keys(meta.global_indexes, p)
        assert keys == [None, None]
        assert await client.async_check_production_status(["x"], p)
        return [index for part in parts for index in part.global_indexes]

    def thread(task: str) -> list[int]:
        return asyncio.run(work(task))

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(thread, ["a", "b"]))
    assert [len(set(part)) for part in got] == [2, 2]
    assert asyncio.run(client.async_get_partition_list()) == [p]


FORK = """
import os, sys, warnings
from dataplane.config import Config
from dataplane.host import embedded
from tests.dataplane.compat.instances import Instance, data
runtime_dir, shm_dir = sys.argv[1:]
config = Config(
    host="embedded", open_schemas=True, capacity_bytes=32 << 20, segment_bytes=4 << 20,
    start_timeout_s=60.0, runtime_dir=runtime_dir, shm_dir=shm_dir,
)
host = embedded.start("forking", config)
one = Instance(host, config)
client = one.client
made = client.put(data(4), partition_id="p").global_indexes
mine = client.get_meta(["x"], 2, "p", task_name="t").global_indexes
# Python 3.12 warns of the threads that do not come along; data loaders fork all the same.
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if not child:
    try:
        meta = client.get_meta(["x"], 2, "p", task_name="t")
        told = [*meta.global_indexes, *client.get_data(meta)["x"].tolist()]
        assert told == [*made[2:], 2, 3], told
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert mine == made[:2]
one.server.stop()
for link in one.links:
    link.close()
host.stop()
"""


def test_a_forked_worker_claims_with_the_client_that_it_inherited(roots: dict[str, Path]) -> None:
    """In a process of its own: what others of this one have of gRPC may crash a child of it."""
    ran = subprocess.run(
        [sys.executable, "-c", FORK, str(roots["runtime_dir"]), str(roots["shm_dir"])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}:{compat.folder()}"},
    )
    assert ran.returncode == 0, ran.stderr


def test_what_an_instance_keeps_is_in_no_listing(instance: Make) -> None:
    one = instance()
    p = name()
    one.client.put(data(1), partition_id=p)
    put(one.client, p, ["k"])
    one.client.kv_retrieve_meta(["k"], p)
    assert one.client.kv_list() == {p: {"k": {"status": "new", "at": 0}}}
    assert one.client.get_partition_list() == [p]
    assert HIDDEN in one.client.link.sync.kv_list_partitions()
    assert any(key.startswith(KEYLESS) for key in one.client.link.sync.kv_list(p).keys)


def test_arguments_that_make_no_sense_are_refused(instance: Make) -> None:
    client = instance().client
    with pytest.raises(ValueError, match="data_parser"):
        client.put(data(1), partition_id=name(), data_parser=len)
    with pytest.raises(ValueError, match="partition_id"):
        client.put(data(1))
    with pytest.raises(ValueError, match="empty"):
        client.put(data(1), metadata=BatchMeta())
    with pytest.raises(PartitionNotFound, match="not found"):
        client.get_meta(["x"], 1, "nowhere", mode="force_fetch")
    with pytest.raises(ValueError, match="MooncakeStore"):
        client.initialize_storage_manager("MooncakeStore")
    client.initialize_storage_manager("SimpleStorage", {})
    assert client.get_data(BatchMeta()).batch_size[0] == 0
    with pytest.raises(ValueError, match="None"):
        TransferQueueClient("c", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="zmq_info"):
        TransferQueueClient("c", "host:port")  # pyright: ignore[reportArgumentType]


def test_what_an_instance_keeps_is_out_of_its_users_reach(instance: Make) -> None:
    client = instance().client
    meta = client.put(data(1), partition_id=name())
    meta.update_custom_meta([{RESERVED_TAG: {"index": 999}}])
    with pytest.raises(ValueError, match=RESERVED_TAG):
        client.set_custom_meta(meta)
    with pytest.raises(ValueError, match=RESERVED_TAG):
        client.put(data(1), metadata=meta)
    with pytest.raises(ValueError, match=KEYLESS):
        client.kv_retrieve_meta([f"{KEYLESS}5"], name(), create=True)
    for call in (
        lambda: client.put(data(1), partition_id=HIDDEN),
        lambda: client.get_meta(["x"], 1, HIDDEN, mode="insert"),
        lambda: client.kv_retrieve_meta(["a"], HIDDEN, create=True),
        lambda: client.clear_partition(HIDDEN),
        lambda: client.reset_consumption(HIDDEN),
    ):
        with pytest.raises(ValueError, match=HIDDEN):
            call()


def test_threads_that_share_a_client_wait_side_by_side(instance: Make) -> None:
    one = instance(polling_mode=False)
    p = name()
    got: list[int] = []

    def claim() -> None:
        got.extend(one.client.get_meta(["x"], 1, p, task_name="t").global_indexes)

    threads = [threading.Thread(target=claim) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: one.server.service.mirrors.waiting == 3, "all of them wait")
    made = one.client.put(data(3), partition_id=p).global_indexes
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(got) == made
