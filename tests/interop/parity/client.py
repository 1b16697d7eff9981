"""Cases of the low-level client: rows without keys, partitions, tags, its own life and settings."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.interop.parity.batches import batch, ints, objects
from tests.interop.parity.cases import category, raised, says
from tests.interop.parity.indexed import placed, some_rows, status_of

case = category("client", live=True)


@case
def rows_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(3), partition_id=p)
    steps = [b - a for a, b in zip(meta.global_indexes, meta.global_indexes[1:], strict=False)]
    return [placed(meta, meta), steps, client.get_data(meta), tq.kv_list(p)]


@case
def a_put_without_a_place(tq: Any, p: str) -> Any:
    return raised(tq.get_client().put, some_rows(2))


@case
def a_put_to_an_empty_batch(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return raised(client.put, some_rows(2), tq.BatchMeta.empty())


@case
def fields_are_added_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(3), partition_id=p)
    more = client.put(batch(score=torch.tensor([0.5, 1.5, 2.5]), s=objects("a", "b", "c")), meta)
    return [placed(more, meta), client.get_data(more)]


@case
def fields_of_some_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(4), partition_id=p)
    part = client.put(batch(score=ints(7, 8)), meta.select_samples([3, 1]))
    whole = client.get_meta([], 4, p, mode="force_fetch")
    return [placed(part, meta), client.get_data(part), placed(whole, meta).get("field_names")]


@case
def data_of_an_empty_batch(tq: Any, p: str) -> Any:
    return tq.get_client().get_data(tq.BatchMeta.empty())


@case
def data_of_some_fields(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(3), partition_id=p)
    return [client.get_data(meta.select_fields(["n"])), client.get_data(meta.select_fields([]))]


@case
def data_in_another_order(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(4), partition_id=p)
    parts = [meta.select_samples([2, 0]), meta[1:3], *meta.chunk(3)]
    turned = meta.copy()
    turned.reorder([3, 2, 1, 0])
    return [client.get_data(part) for part in (*parts, turned, tq.BatchMeta.concat(parts[::-1]))]


@case
def rows_are_allocated(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.get_meta(["n"], 3, p, mode="insert")
    filled = client.put(batch(n=ints(4, 5, 6)), meta.copy())
    return [placed(meta, meta), placed(filled, meta), client.get_data(filled)]


@case
def partitions(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(some_rows(1), partition_id=p + "/2")
    tq.kv_put("a", p + "/1", tag={"x": 1})
    before = client.get_partition_list()
    client.clear_partition(p + "/2")
    after = client.get_partition_list()
    return [sorted(n for n in names if n.startswith(p + "/")) for names in (before, after)]


@case
def a_partition_is_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(some_rows(3), partition_id=p)
    tq.kv_put("a", p, fields={"n": torch.tensor(1)}, tag={"x": 1})
    said = client.clear_partition(p)
    return [said, tq.kv_list(p), client.get_consumption_status("train", p), p in tq.kv_list()]


@case
def an_unknown_partition_is_cleared(tq: Any, p: str) -> Any:
    return tq.get_client().clear_partition(p)


@case
def rows_are_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(4), partition_id=p)
    said = client.clear_samples(made.select_samples([1, 2]))
    rest = client.get_meta(["n"], 2, p, task_name="train")
    return [
        said,
        placed(rest, made),
        client.get_data(rest),
        raised(client.clear_samples, tq.BatchMeta.empty()),
    ]


@case
def rows_with_keys_are_cleared(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, fields=some_rows(3), tags=[{"i": i} for i in range(3)])
    client.clear_samples(client.kv_retrieve_meta(["a", "c"], p))
    return tq.kv_list(p)


@case
def custom_meta_is_written(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=some_rows(2), tags=[{"x": 1}, {"x": 2}])
    meta = client.kv_retrieve_meta(["b", "a"], p)
    meta.update_custom_meta([{"new": 1}, {"x": 7}])
    return [client.set_custom_meta(meta), tq.kv_list(p)]


@case
def custom_meta_of_rows_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(2), partition_id=p)
    meta.update_custom_meta([{"new": 1}, {"new": 2}])
    client.set_custom_meta(meta)
    return client.get_meta(["n"], 2, p, task_name="train").custom_meta


@case
def a_put_writes_custom_meta(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=some_rows(2))
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
        made = await client.async_put(some_rows(3), partition_id=p)
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
            placed(meta, made),
            status_of(status, made),
            data,
            done,
            reset,
            placed(left, made),
            listed,
        ]

    return asyncio.run(main())


@case
def data_of_cleared_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(2), partition_id=p)
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

    keyed = tq.kv_batch_put(["a", "b"], p, fields=some_rows(2), tags=[{"i": 0}, {"i": 1}])
    rows = tq.get_client().kv_retrieve_meta(["b", "a"], p)
    got, back, data, same, listing = ray.get(work.remote(keyed, rows))
    return [got, back, data, placed(same, rows), listing, tq.kv_list(p)]


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
