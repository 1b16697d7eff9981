"""Rows by index through the low-level client: put, read, cleared; with keys, without, with tags."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from transfer_queue import (
    BatchMeta,
    StorageKeyNotFoundError,
)

from dataplane.errors import (
    FieldNotFound,
    KeyNotFound,
    PartitionNotFound,
)
from tests.dataplane.compat.instances import Make, data, name, put

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
