"""The low-level client and the controller over a plane without Ray: claims, statuses, restarts."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from transfer_queue import (
    BatchMeta,
    GRPOGroupNSampler,
    RankAwareSampler,
    SequentialSampler,
    StorageKeyNotFoundError,
    TransferQueueClient,
)
from transfer_queue.control.serving import ControllerServer
from transfer_queue.link import Link
from transfer_queue.names import HIDDEN, KEYLESS, RESERVED_TAG
from transfer_queue.sampler import BaseSampler

from dataplane.config import Config
from dataplane.errors import (
    DeadlineExceeded,
    FieldNotFound,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    Unreachable,
)
from dataplane.host import embedded
from tests.deadline import eventually

WAIT_S = 20.0


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[tuple[embedded.EmbeddedHost, Config]]:
    config = Config(
        host="embedded", open_schemas=True, capacity_bytes=32 << 20, segment_bytes=4 << 20,
        wait_timeout_s=WAIT_S, start_timeout_s=60.0, **roots,
    )  # fmt: skip
    host = embedded.start(f"tq-{os.getpid()}", config)
    yield host, config
    host.stop()


class Instance:
    """A controller that tests end and begin, and a client of it."""

    def __init__(self, host: embedded.EmbeddedHost, config: Config, **options: Any) -> None:
        self.host = host
        self.config = config
        self.options: dict[str, Any] = {"polling_mode": True, **options}
        self.links: list[Link] = []
        self.start()
        self.client = self.join()

    def start(self, sampler: BaseSampler | None = None) -> None:
        options = dict(self.options)
        sampler = sampler or options.pop("sampler", SequentialSampler)()
        options.pop("sampler", None)
        self.server = ControllerServer(self.host.joined.name, self.config, sampler, **options)
        self.server.up()

    def join(self, **settings: Any) -> TransferQueueClient:
        address = self.host.joined.tags.unix
        info = {"plane": self.host.joined.name, "address": address}
        link = Link.at(info, self.config.model_copy(update=settings))
        self.links.append(link)
        return TransferQueueClient("test", info, link=link)

    def restart(self) -> None:
        self.server.stop()
        self.start()


Make = Callable[..., Instance]


@pytest.fixture
def instance(plane: tuple[embedded.EmbeddedHost, Config]) -> Iterator[Make]:
    made: list[Instance] = []

    def make(**options: Any) -> Instance:
        made.append(Instance(*plane, **options))
        return made[-1]

    yield make
    for one in made:
        for name in one.client.get_partition_list():
            one.client.clear_partition(name)
        one.server.stop()
        for link in one.links:
            link.close()


def data(count: int, **fields: Any) -> TensorDict:
    return TensorDict({"x": torch.arange(count), **fields}, batch_size=count)


def name() -> str:
    return f"p-{secrets.token_hex(4)}"


# -- rows without keys -----------------------------------------------------------------------


def test_rows_are_put_claimed_read_and_counted(instance: Make) -> None:
    client = instance().client
    p = name()
    made = client.put(data(5, y=torch.ones(5, 2)), partition_id=p)
    assert made.size == 5
    assert made.field_names == ["x", "y"]
    assert made.is_ready
    first = client.get_meta(["x"], 2, p, task_name="t")
    assert first.global_indexes == made.global_indexes[:2]
    assert first.field_schema["x"]["dtype"] == torch.int64
    assert client.get_data(first)["x"].tolist() == [0, 1]
    assert client.check_consumption_status("t", p) is False
    indexes, flags = client.get_consumption_status("t", p)
    assert indexes is not None
    assert flags is not None
    assert indexes.tolist() == made.global_indexes
    assert (indexes.dtype, flags.dtype) == (torch.int64, torch.int8)
    assert flags.tolist() == [1, 1, 0, 0, 0]
    rest = client.get_meta(["x", "y"], 3, p, task_name="t")
    assert client.get_data(rest)["y"].shape[0] == 3
    assert client.check_consumption_status("t", p) is True
    assert client.get_meta(["x"], 1, p, task_name="t").size == 0
    assert client.get_meta(["x"], 5, p, task_name="other").size == 5
    assert client.kv_list(p) == {p: {}}
    assert client.reset_consumption(p, "t") is True
    assert client.check_consumption_status("t", p) is False
    assert client.get_meta(["x"], 5, p, task_name="t").size == 5
    assert client.get_partition_list() == [p]
    client.clear_partition(p)
    assert client.get_partition_list() == []
    assert client.get_consumption_status("t", p) == (None, None)
    assert client.check_production_status(["x"], p) is False
    assert client.reset_consumption(p) is True


def test_inserted_rows_are_ready_field_by_field(instance: Make) -> None:
    client = instance().client
    p = name()
    made = client.get_meta(["x", "y"], 3, p, mode="insert")
    assert made.field_names == ["x", "y"]
    assert not made.is_ready
    assert client.get_meta(["x"], 1, p, task_name="t").size == 0
    client.put(data(2), metadata=made.select_samples([0, 2]))
    everything = client.get_meta(["x", "y", "none"], 1, p, mode="force_fetch")
    assert everything.global_indexes == made.global_indexes
    assert everything.production_status.tolist() == [1, 0, 1]
    assert client.check_production_status(["x"], p) is False
    client.put(TensorDict({"y": torch.zeros(3, 4)}, batch_size=3), metadata=made)
    everything = client.get_meta(["x", "y"], 1, p, mode="force_fetch")
    assert everything.production_status.tolist() == [1, 0, 1]
    with pytest.raises(FieldNotFound):
        client.get_data(everything)
    assert client.get_data(everything.select_samples([2, 0]))["x"].tolist() == [1, 0]
    indexes, flags = client.get_production_status(["x", "y"], p)
    assert indexes is not None
    assert flags is not None
    assert flags.tolist() == [[1, 1], [0, 1], [1, 1]]
    assert client.get_production_status(["x", "none"], p) == (None, None)
    assert client.get_meta(["y", "x"], 2, p, task_name="t").global_indexes == [
        made.global_indexes[at] for at in (0, 2)
    ]


def test_shapes_are_those_of_the_rows_that_are_there(instance: Make) -> None:
    client = instance().client
    p = name()
    client.put(TensorDict({"f": torch.ones(2, 4), "s": ["a", "b"]}, batch_size=2), partition_id=p)
    schema = client.get_meta(["f", "s"], 2, p, mode="force_fetch").field_schema
    assert schema["f"]["shape"] == torch.Size([4])
    assert schema["f"]["is_nested"] is False
    assert schema["s"]["is_non_tensor"] is True
    client.put(TensorDict({"f": torch.ones(1, 6).half()}, batch_size=1), partition_id=p)
    meta = client.get_meta(["f"], 3, p, mode="force_fetch")
    assert meta.field_schema["f"]["is_nested"] is True
    assert meta.get_shapes("f") == [(4,), (4,), (6,)]
    assert [row.numel() for row in client.get_data(meta)["f"].unbind()] == [4, 4, 6]


def test_a_list_that_one_non_tensor_holds_is_a_value_per_row(instance: Make) -> None:
    client = instance().client
    values = [{"n": 0}, {"n": 1}]
    held = NonTensorData(data=values, batch_size=(2,))
    meta = client.put(TensorDict({"o": held}, batch_size=2), partition_id=name())
    assert list(client.get_data(meta[1:])["o"]) == [{"n": 1}]
    with pytest.raises(TypeError, match="one NonTensorData"):
        one = NonTensorData(data="same", batch_size=(2,))
        client.put(TensorDict({"o": one}, batch_size=2), metadata=meta)


# -- rows with keys --------------------------------------------------------------------------


def put(client: TransferQueueClient, p: str, keys: list[str], **fields: Any) -> None:
    client.link.sync.kv_batch_put(
        keys, p, fields or None, [{"status": "new", "at": at} for at in range(len(keys))]
    )


def test_keys_become_rows_in_the_order_in_which_they_came(instance: Make) -> None:
    client = instance().client
    p = name()
    put(client, p, ["z", "y"])
    put(client, p, ["b", "a"], x=torch.arange(2))
    put(client, p, ["y"], x=torch.arange(1))
    meta = client.kv_retrieve_meta(["a", "none", "y", "a"], p)
    assert client.kv_retrieve_keys(meta.global_indexes, p) == ["a", "y", "a"]
    everything = client.get_meta(["x"], 1, p, mode="force_fetch")
    assert client.kv_retrieve_keys(everything.global_indexes, p) == ["z", "y", "b", "a"]
    assert everything.production_status.tolist() == [0, 1, 1, 1]
    assert meta.field_names == ["x"]
    assert [tags["at"] for tags in meta.custom_meta] == [1, 0, 1]
    assert client.kv_list(p)[p]["y"] == {"status": "new", "at": 0}
    assert client.kv_retrieve_keys([10**6], p) == [None]
    with pytest.raises(PartitionNotFound):
        client.kv_retrieve_keys([0], "nowhere")
    with pytest.raises(ValueError, match="empty"):
        client.kv_retrieve_meta([], p)
    with pytest.raises(TypeError):
        client.kv_retrieve_keys(["0"], p)  # pyright: ignore[reportArgumentType]


def test_rows_that_come_later_are_numbered_in_the_order_in_which_they_came(instance: Make) -> None:
    client = instance().client
    p = name()
    put(client, p, ["first"])
    assert client.kv_retrieve_meta(["first"], p).size == 1
    for keys in (["d", "a"], ["c"], ["b"]):
        put(client, p, keys)
    put(client, p, ["d", "first"], x=torch.arange(2))
    indexes = client.kv_retrieve_meta(["first", "d", "a", "c", "b"], p).global_indexes
    assert indexes == list(range(indexes[0], indexes[0] + 5))


def test_keys_are_made_where_that_is_asked_for(instance: Make) -> None:
    client = instance().client
    p = name()
    assert client.kv_retrieve_meta(["a"], p).size == 0
    assert client.get_partition_list() == []
    made = client.kv_retrieve_meta(["a", "b"], p, create=True)
    assert made.size == 2
    assert client.kv_list(p) == {p: {"a": {}, "b": {}}}
    again = client.kv_retrieve_meta(["b", "c", "a"], p, create=True)
    assert again.global_indexes[::2] == made.global_indexes[::-1]
    client.put(data(3), metadata=again)
    assert client.kv_retrieve_meta("c", p).is_ready


def test_a_batch_carries_its_keys_through_a_pickle_and_needs_no_controller(instance: Make) -> None:
    one = instance()
    p = name()
    put(one.client, p, ["a", "b"], x=torch.arange(2))
    meta = pickle.loads(pickle.dumps(one.client.kv_retrieve_meta(["b", "a"], p)))  # noqa: S301
    one.server.stop()
    assert one.client.get_data(meta)["x"].tolist() == [1, 0]
    one.client.put(TensorDict({"z": torch.ones(2)}, batch_size=2), metadata=meta)
    one.start()
    bare = BatchMeta(meta.global_indexes, meta.partition_ids, {"z": {}})
    assert one.client.get_data(bare)["z"].tolist() == [1.0, 1.0]


def test_batches_of_several_partitions_are_read_and_written_in_their_order(instance: Make) -> None:
    client = instance().client
    p, q = name(), name()
    for at, partition in enumerate((p, q)):
        put(client, partition, ["a", "b"], x=torch.tensor([[at], [at + 10]]))
    mixed = BatchMeta.concat([client.kv_retrieve_meta(["a", "b"], of) for of in (p, q)])
    mixed.reorder([0, 2, 1, 3])
    assert [row.tolist() for row in client.get_data(mixed)["x"].unbind()] == [[0], [1], [10], [11]]
    client.put(TensorDict({"n": torch.arange(4)}, batch_size=4), metadata=mixed)
    assert client.get_data(client.kv_retrieve_meta(["a", "b"], q))["n"].tolist() == [1, 3]


# -- tags ------------------------------------------------------------------------------------


def test_a_put_by_meta_writes_no_tag_that_it_only_read(instance: Make) -> None:
    client = instance().client
    p = name()
    put(client, p, ["a", "b"], x=torch.arange(2))
    meta = client.kv_retrieve_meta(["a", "b"], p)
    client.link.sync.kv_put("a", p, tags={"status": "finished"})
    meta.update_custom_meta([{"score": 0.5}, {}])
    client.put(TensorDict({"y": torch.ones(2)}, batch_size=2), metadata=meta.chunk(1)[0])
    assert client.kv_list(p)[p]["a"] == {"status": "finished", "at": 0, "score": 0.5}
    meta.update_custom_meta([{"status": "mine"}, {"seen": [1, 2]}])
    client.set_custom_meta(meta)
    assert client.kv_list(p)[p]["a"]["status"] == "mine"
    fetched = client.get_meta(["y"], 2, p, task_name="t")
    assert fetched.custom_meta[1] == {"status": "new", "at": 1, "seen": [1, 2]}


def test_a_late_write_brings_no_row_back(instance: Make) -> None:
    client = instance().client
    p = name()
    meta = client.put(data(2), partition_id=p)
    client.clear_samples(meta[:1])
    client.clear_samples(meta[:1])
    with pytest.raises(KeyNotFound):
        client.put(TensorDict({"y": torch.ones(2)}, batch_size=2), metadata=meta)
    with pytest.raises(KeyNotFound):
        meta.update_custom_meta([{"a": 1}, {}])
        client.set_custom_meta(meta)
    with pytest.raises(StorageKeyNotFoundError) as caught:
        client.get_data(meta)
    assert len(caught.value.keys) == 1
    left = client.get_meta(["x", "y"], 1, p, mode="force_fetch")
    assert left.global_indexes == meta.global_indexes[1:]
    assert left.field_names == ["x"]
    new = client.put(data(1), partition_id=p)
    assert new.global_indexes[0] > max(meta.global_indexes)


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


def test_a_forked_worker_claims_with_the_client_that_it_inherited(instance: Make) -> None:
    client = instance().client
    p = name()
    made = client.put(data(4), partition_id=p).global_indexes
    mine = client.get_meta(["x"], 2, p, task_name="t").global_indexes
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of the threads that do not come along; data loaders fork all the same.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            meta = client.get_meta(["x"], 2, p, task_name="t")
            told = [*meta.global_indexes, *client.get_data(meta)["x"].tolist()]
            os.write(write, repr(told).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told == repr([*made[2:], 2, 3])
    assert mine == made[:2]


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
