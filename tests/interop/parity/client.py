"""Cases of the low-level client: rows without keys, claims, status, keys to rows and back.

Indexes themselves differ by design (the drop-in never gives one out twice), so what is compared
is their order: `_meta` shows each index by its place among all that the case has seen.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDict

from tests.interop.parity.batches import batch, ints, jagged, objects
from tests.interop.parity.cases import category, raised, says
from tests.interop.parity.describe import describe

case = category("client", live=True)


def _rows(n: int) -> TensorDict:
    return batch(n=torch.arange(n), v=jagged(*[list(range(i + 1)) for i in range(n)]))


def _meta(meta: Any, among: Any) -> Any:
    """A batch with places for indexes: the place in `among`, a batch or a list of indexes.

    Shapes are lists, as the peer has them once they went over its wire; before, they are tuples.
    """
    known = list(getattr(among, "global_indexes", among))
    said = describe(meta)
    for field in said["field_schema"].values():
        field["shape"] = _plain(field["shape"])
        if "per_sample_shapes" in field:
            field["per_sample_shapes"] = [_plain(shape) for shape in field["per_sample_shapes"]]
    places = [known.index(i) if i in known else "new" for i in meta.global_indexes]
    return {**said, "global_indexes": places}


def _in_order(meta: Any) -> Any:
    """The rows by index: the peer's fetch of everything has them in the order of a set."""
    return meta.select_samples(sorted(range(len(meta)), key=meta.global_indexes.__getitem__))


def _plain(shape: Any) -> Any:
    return shape["values"] if isinstance(shape, dict) else shape


def _status(found: Any, among: Any) -> Any:
    indexes, flags = found
    if indexes is None or flags is None:
        return [indexes, flags]
    known = among.global_indexes
    return [[known.index(int(i)) for i in indexes], str(indexes.dtype), flags]


@case
def rows_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(3), partition_id=p)
    steps = [b - a for a, b in zip(meta.global_indexes, meta.global_indexes[1:], strict=False)]
    return [_meta(meta, meta), steps, client.get_data(meta), tq.kv_list(p)]


@case
def a_put_without_a_place(tq: Any, p: str) -> Any:
    return raised(tq.get_client().put, _rows(2))


@case
def a_put_to_an_empty_batch(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return raised(client.put, _rows(2), tq.BatchMeta.empty())


@case
def fields_are_added_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(3), partition_id=p)
    more = client.put(batch(score=torch.tensor([0.5, 1.5, 2.5]), s=objects("a", "b", "c")), meta)
    return [_meta(more, meta), client.get_data(more)]


@case
def fields_of_some_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(4), partition_id=p)
    part = client.put(batch(score=ints(7, 8)), meta.select_samples([3, 1]))
    whole = client.get_meta([], 4, p, mode="force_fetch")
    return [_meta(part, meta), client.get_data(part), _meta(whole, meta).get("field_names")]


@case
def data_of_an_empty_batch(tq: Any, p: str) -> Any:
    return tq.get_client().get_data(tq.BatchMeta.empty())


@case
def data_of_some_fields(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(3), partition_id=p)
    return [client.get_data(meta.select_fields(["n"])), client.get_data(meta.select_fields([]))]


@case
def data_in_another_order(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(4), partition_id=p)
    parts = [meta.select_samples([2, 0]), meta[1:3], *meta.chunk(3)]
    turned = meta.copy()
    turned.reorder([3, 2, 1, 0])
    return [client.get_data(part) for part in (*parts, turned, tq.BatchMeta.concat(parts[::-1]))]


@case
def rows_are_allocated(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.get_meta(["n"], 3, p, mode="insert")
    filled = client.put(batch(n=ints(4, 5, 6)), meta.copy())
    return [_meta(meta, meta), _meta(filled, meta), client.get_data(filled)]


@case
def a_claim(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(4), partition_id=p)
    meta = client.get_meta(["n"], 2, p, task_name="train")
    return [_meta(meta, made), client.get_data(meta)]


@case
def claims_never_give_a_row_twice(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(5), partition_id=p)
    claims = [client.get_meta(["n", "v"], 2, p, task_name="train") for _ in range(3)]
    return [_meta(meta, made) for meta in claims]


@case
def tasks_claim_apart(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    claims = [client.get_meta(["n"], 3, p, task_name=task) for task in ("one", "two", "one")]
    return [_meta(meta, made)["global_indexes"] for meta in claims]


@case
def a_claim_of_more_than_is_ready(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(2), partition_id=p)
    short = client.get_meta(["n"], 3, p, task_name="train")
    return [short, _meta(client.get_meta(["n"], 2, p, task_name="train"), made)["global_indexes"]]


@case
def a_claim_of_a_field_that_fills_up(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    client.put(batch(score=ints(1, 2)), made.select_samples([2, 0]))
    claims = [client.get_meta(["n", "score"], 2, p, task_name="train")]
    client.put(batch(score=ints(3)), made.select_samples([1]))
    claims.append(client.get_meta(["n", "score"], 1, p, task_name="train"))
    return [[_meta(meta, made) for meta in claims], [client.get_data(meta) for meta in claims]]


@case
def a_claim_in_an_unknown_partition(tq: Any, p: str) -> Any:
    return tq.get_client().get_meta(["n"], 1, p, task_name="train")


@case
def a_claim_without_a_task(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(_rows(2), partition_id=p)
    return raised(client.get_meta, ["n"], 1, p)


@case
def an_unknown_mode(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(_rows(2), partition_id=p)
    return raised(client.get_meta, ["n"], 1, p, mode="peek", task_name="train")


@case
def a_fetch_of_everything(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    client.get_meta(["n"], 2, p, task_name="train")
    whole = _in_order(client.get_meta(["n"], 3, p, mode="force_fetch"))
    left = client.get_meta(["n"], 1, p, task_name="train")
    return [_meta(whole, made), _meta(left, made)["global_indexes"]]


@case
def a_fetch_of_everything_with_rows_that_are_not_ready(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(2), partition_id=p)
    empty = client.get_meta(["n"], 1, p, mode="insert")
    whole = _in_order(client.get_meta(["n"], 3, p, mode="force_fetch"))
    return _meta(whole, made.global_indexes + empty.global_indexes)


@case
def a_fetch_of_a_field_that_some_rows_have(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    client.put(batch(score=ints(1)), made.select_samples([1]))
    whole = client.get_meta(["score"], 3, p, mode="force_fetch")
    return _meta(_in_order(whole), made)


@case
def consumption(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    before = _status(client.get_consumption_status("train", p), made)
    client.get_meta(["n"], 2, p, task_name="train")
    after = _status(client.get_consumption_status("train", p), made)
    part = client.check_consumption_status("train", p)
    client.get_meta(["n"], 1, p, task_name="train")
    return [before, after, part, client.check_consumption_status("train", p)]


@case
def consumption_of_an_unknown_partition(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [client.get_consumption_status("train", p), client.check_consumption_status("train", p)]


@case
def production(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(3), partition_id=p)
    client.put(batch(score=ints(1, 2)), made.select_samples([0, 2]))
    wanted = (["n"], ["n", "v"], ["score"], ["n", "score"], ["unknown"])
    return [
        [_status(client.get_production_status(f, p), made), client.check_production_status(f, p)]
        for f in wanted
    ]


@case
def production_of_an_unknown_partition(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [client.get_production_status(["n"], p), client.check_production_status(["n"], p)]


@case
def consumption_is_forgotten(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(2), partition_id=p)
    for task in ("one", "two"):
        client.get_meta(["n"], 2, p, task_name=task)
    said = [client.reset_consumption(p, "one")]
    said += [client.check_consumption_status(task, p) for task in ("one", "two")]
    again = client.get_meta(["n"], 2, p, task_name="one")
    said += [client.reset_consumption(p), client.check_consumption_status("two", p)]
    return [said, _meta(again, made)["global_indexes"]]


@case
def consumption_of_an_unknown_partition_is_forgotten(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [raised(client.reset_consumption, p), raised(client.reset_consumption, p, "train")]


@case
def partitions(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(_rows(1), partition_id=p + "/2")
    tq.kv_put("a", p + "/1", tag={"x": 1})
    before = client.get_partition_list()
    client.clear_partition(p + "/2")
    after = client.get_partition_list()
    return [sorted(n for n in names if n.startswith(p + "/")) for names in (before, after)]


@case
def a_partition_is_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(_rows(3), partition_id=p)
    tq.kv_put("a", p, fields={"n": torch.tensor(1)}, tag={"x": 1})
    said = client.clear_partition(p)
    return [said, tq.kv_list(p), client.get_consumption_status("train", p), p in tq.kv_list()]


@case
def an_unknown_partition_is_cleared(tq: Any, p: str) -> Any:
    return tq.get_client().clear_partition(p)


@case
def rows_are_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(_rows(4), partition_id=p)
    said = client.clear_samples(made.select_samples([1, 2]))
    rest = client.get_meta(["n"], 2, p, task_name="train")
    return [
        said,
        _meta(rest, made),
        client.get_data(rest),
        raised(client.clear_samples, tq.BatchMeta.empty()),
    ]


@case
def rows_with_keys_are_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, fields=_rows(3), tags=[{"i": i} for i in range(3)])
    client.clear_samples(client.kv_retrieve_meta(["a", "c"], p))
    return tq.kv_list(p)


@case
def keys_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, fields=_rows(3), tags=[{"i": i} for i in range(3)])
    whole = client.kv_retrieve_meta(["a", "b", "c"], p)
    part = client.kv_retrieve_meta(["c", "absent", "a"], p)
    return [_meta(whole, whole), _meta(part, whole), client.get_data(part)]


@case
def a_key_twice_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=_rows(2))
    twice = client.kv_retrieve_meta(["b", "a", "b"], p)
    return _meta(twice, twice)


@case
def unknown_keys_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_put("a", p, tag={})
    return [
        client.kv_retrieve_meta(["x"], p),
        raised(client.kv_retrieve_meta, ["x"], p + "/unknown"),
    ]


@case
def new_keys_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_put("a", p, tag={"old": 1})
    meta = client.kv_retrieve_meta(["a", "b"], p, create=True)
    filled = client.put(batch(n=ints(1, 2)), meta)
    return [_meta(filled, filled), tq.kv_list(p), tq.kv_batch_get(["b", "a"], p)]


@case
def keys_of_a_wrong_kind_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    wrong = ([], ["a", 1], ("a",), 3)
    return [raised(client.kv_retrieve_meta, keys, p) for keys in wrong]


@case
def keys_that_share_no_field_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_put("a", p, fields={"x": torch.tensor(1)})
    tq.kv_put("b", p, fields={"y": torch.tensor(1)})
    meta = client.kv_retrieve_meta(["a", "b"], p)
    return _meta(meta, meta)


@case
def rows_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, tags=[{}, {}, {}])
    indexes = client.kv_retrieve_meta(["c", "a"], p).global_indexes
    return [client.kv_retrieve_keys(indexes, p), client.kv_retrieve_keys(indexes[0], p)]


@case
def rows_without_keys_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(2), partition_id=p)
    return [raised(client.kv_retrieve_keys, meta.global_indexes, p)]


@case
def unknown_rows_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_put("a", p, tag={})
    return [
        raised(client.kv_retrieve_keys, [10**8], p),
        raised(client.kv_retrieve_keys, [0], p + "/x"),
    ]


@case
def rows_of_a_wrong_kind_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [raised(client.kv_retrieve_keys, rows, p) for rows in ([], ["a"], "a", (1,))]


@case
def claims_of_rows_with_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["b", "a", "c"], p, fields=_rows(3), tags=[{"i": i} for i in range(3)])
    meta = client.get_meta(["n"], 2, p, task_name="train")
    return [
        client.kv_retrieve_keys(meta.global_indexes, p),
        meta.custom_meta,
        client.get_data(meta),
    ]


@case
def rows_with_and_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(_rows(2), partition_id=p)
    tq.kv_put("a", p, fields={"n": torch.tensor(9), "v": ints(9)}, tag={"x": 1})
    meta = client.get_meta(["n"], 3, p, task_name="train")
    return [client.get_data(meta), meta.custom_meta, tq.kv_list(p)]


@case
def custom_meta_is_written(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=_rows(2), tags=[{"x": 1}, {"x": 2}])
    meta = client.kv_retrieve_meta(["b", "a"], p)
    meta.update_custom_meta([{"new": 1}, {"x": 7}])
    return [client.set_custom_meta(meta), tq.kv_list(p)]


@case
def custom_meta_of_rows_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(2), partition_id=p)
    meta.update_custom_meta([{"new": 1}, {"new": 2}])
    client.set_custom_meta(meta)
    return client.get_meta(["n"], 2, p, task_name="train").custom_meta


@case
def a_put_writes_custom_meta(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=_rows(2))
    meta = client.kv_retrieve_meta(["a", "b"], p)
    meta.update_custom_meta([{"i": 0}, {"i": 1}])
    client.put(batch(score=ints(1, 2)), meta)
    return tq.kv_list(p)


@case
def the_clients_own_listing(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{"i": 0}, {"i": 1}])
    return [tq.get_client().kv_list(p), tq.get_client().kv_list(p + "/unknown")]


@case
def verbs_of_an_event_loop(tq: Any, p: str) -> Any:
    client = tq.get_client()

    async def main() -> Any:
        made = await client.async_put(_rows(3), partition_id=p)
        meta = await client.async_get_meta(["n"], 2, p, task_name="train")
        status = await client.async_get_consumption_status("train", p)
        data = await client.async_get_data(meta)
        done = await client.async_check_consumption_status("train", p)
        reset = await client.async_reset_consumption(p, "train")
        await client.async_clear_samples(meta)
        left = await client.async_get_meta(["n"], 1, p, task_name="train")
        listed = p in await client.async_get_partition_list()
        await client.async_clear_partition(p)
        return [
            _meta(meta, made),
            _status(status, made),
            data,
            done,
            reset,
            _meta(left, made),
            listed,
        ]

    return asyncio.run(main())


@case
def data_of_cleared_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(_rows(2), partition_id=p)
    client.clear_samples(meta)
    return raised(client.get_data, meta)


@case
def a_client_made_of_nothing(tq: Any, p: str) -> Any:
    return [
        raised(tq.TransferQueueClient, "id", None),
        raised(tq.TransferQueueClient, "id", "text"),
    ]


@case
def metrics_that_are_off(tq: Any, p: str) -> Any:
    return tq.get_metrics_endpoint()


@case
def a_second_init(tq: Any, p: str) -> Any:
    conf = {"controller": {"sampler": "RankAwareSampler"}}
    first = tq.get_client()
    return [tq.init(), tq.init(conf) is conf, tq.get_client() is first]


@case
def a_bad_backend(tq: Any, p: str) -> Any:
    return says(
        lambda: tq.get_client().initialize_storage_manager("NoSuchStore", {}), "NoSuchStore"
    )


@case
def the_stored_settings(tq: Any, p: str) -> Any:
    import ray

    actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    conf = ray.get(actor.get_config.remote())
    return {
        "type": type(conf).__name__,
        "a key of the caller": conf.get("enable"),
        "polling": conf.controller.polling_mode,
        "sampler": conf.controller.sampler,
        "metrics": conf.metrics.enabled,
        "backend": conf.backend.storage_backend,
        "units": conf.backend.SimpleStorage.num_data_storage_units,
    }


@case
def the_default_settings(tq: Any, p: str) -> Any:
    from importlib import resources

    from omegaconf import OmegaConf

    conf = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    return {
        "names": sorted(conf), "controller": sorted(conf.controller),
        "backend": sorted(conf.backend),
        "units": conf.backend.SimpleStorage.num_data_storage_units,
        "sampler": conf.controller.sampler, "polling": conf.controller.polling_mode,
        "metrics": OmegaConf.to_container(conf.metrics),
    }  # fmt: skip


@case
def a_worker_that_never_called_init(tq: Any, p: str) -> Any:
    import ray

    @ray.remote(num_cpus=0)
    def work(keyed: Any, rows: Any) -> Any:
        import transfer_queue

        got = transfer_queue.kv_batch_get_by_meta(keyed)
        back = transfer_queue.kv_batch_put(
            keyed.keys, keyed.partition_id, tags=[{"seen": True}] * 2
        )
        data = transfer_queue.get_client().get_data(rows)
        return [got, back, data, rows, transfer_queue.kv_list(keyed.partition_id)]

    keyed = tq.kv_batch_put(["a", "b"], p, fields=_rows(2), tags=[{"i": 0}, {"i": 1}])
    rows = tq.get_client().kv_retrieve_meta(["b", "a"], p)
    got, back, data, same, listing = ray.get(work.remote(keyed, rows))
    return [got, back, data, _meta(same, rows), listing, tq.kv_list(p)]


@case
def verbs_of_several_loops_at_once(tq: Any, p: str) -> Any:
    def loop(number: int) -> Any:
        async def main() -> Any:
            for step in range(5):
                key = f"{number}-{step}"
                await tq.async_kv_put(key, p, fields={"n": ints(number)}, tag={"step": step})
                await asyncio.sleep(0)
            return await tq.async_kv_batch_get([f"{number}-{i}" for i in range(5)], p)

        return asyncio.run(main())

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(loop, range(3)))
        tq.kv_put("sync", p, tag={"between": True})
    return [found, sorted(tq.kv_list(p)[p])]
