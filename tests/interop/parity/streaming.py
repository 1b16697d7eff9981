"""Cases of streaming: how batches are cut, and what a dataset yields until all is consumed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from tensordict import TensorDict

from tests.interop.parity.batches import batch, ints, jagged, objects, strided
from tests.interop.parity.cases import add, category, raised

case = category("streaming", live=True)

COLUMNS = {
    "dense": torch.arange(10).reshape(5, 2),
    "numbers": ints(1, 2, 3, 4, 5),
    "jagged": jagged([1], [2, 2], [], [4, 4, 4], [5]),
    "strided": strided(*[torch.full((i + 1, 2 * i + 1), i) for i in range(5)]),
    "objects": objects("a", "b", {"c": 1}, None, "e"),
}


def _config() -> Any:
    import ray

    actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    return ray.get(actor.get_config.remote())


def _cut(column: Any) -> Any:
    def cut(tq: Any) -> Any:
        module = importlib.import_module("transfer_queue.dataloader.streaming_dataset")
        meta = tq.BatchMeta(list(range(5)), ["p"] * 5, custom_meta=[{"i": i} for i in range(5)])
        return list(module.chunk_batch_fn(batch(x=column), meta, 2))

    return cut


for _name, _column in COLUMNS.items():
    add("streaming", f"cut_{_name}", _cut(_column), live=False)


def _dataset(tq: Any, p: str, **rest: Any) -> Any:
    given = {
        "batch_size": 2, "micro_batch_size": 1, "data_fields": ["n", "v"], "partition_id": p,
        "task_name": "train", "dp_rank": 0, "should_check_consumption_status": True, **rest,
    }  # fmt: skip
    return tq.StreamingDataset(config=_config(), **given)


def _put(tq: Any, p: str, n: int) -> None:
    rows = batch(n=torch.arange(n), v=jagged(*[list(range(i + 1)) for i in range(n)]))
    tq.kv_batch_put([f"k{i}" for i in range(n)], p, fields=rows, tags=[{"i": i} for i in range(n)])


def _seen(yielded: Any) -> Any:
    """Batches and the tags beside them; indexes differ by design."""
    return [[data, meta.custom_meta, meta.field_names] for data, meta in yielded]


@case
def until_all_is_consumed(tq: Any, p: str) -> Any:
    _put(tq, p, 4)
    return _seen(_dataset(tq, p))


@case
def two_epochs(tq: Any, p: str) -> Any:
    _put(tq, p, 4)
    dataset = _dataset(tq, p, micro_batch_size=2)
    first = _seen(dataset)
    dataset.reset()
    return [first, _seen(dataset)]


@case
def on_to_another_partition(tq: Any, p: str) -> Any:
    _put(tq, p + "/1", 2)
    _put(tq, p + "/2", 2)
    dataset = _dataset(tq, p + "/1", micro_batch_size=2)
    first = _seen(dataset)
    dataset.step(p + "/2")
    return [first, _seen(dataset)]


@case
def through_a_loader(tq: Any, p: str) -> Any:
    _put(tq, p, 4)
    loader = tq.StreamingDataLoader(_dataset(tq, p, micro_batch_size=2))
    return [_seen(loader), len(loader.get_buffer())]


@case
def with_functions_of_ones_own(tq: Any, p: str) -> Any:
    def fetch(**asked: Any) -> Any:
        client = asked.pop("tq_client")
        config = {**asked.pop("sampling_config"), "batch_index": asked.pop("batch_index")}
        meta = client.get_meta(**{**asked, "batch_size": 1}, sampling_config=config)
        return client.get_data(meta), meta

    def process(data: TensorDict, meta: Any, micro_batch_size: int) -> Any:
        yield data, meta
        yield data, meta

    _put(tq, p, 2)
    return _seen(_dataset(tq, p, fetch_batch_fn=fetch, process_batch_fn=process))


@case
def arguments_that_are_refused(tq: Any, p: str) -> Any:
    wrong = ({"micro_batch_size": 0}, {"data_fields": []}, {"dp_rank": -1})
    return [raised(_dataset, tq, p, **given) for given in wrong]
