"""Cases of the low-level client: from keys to rows and back."""

from __future__ import annotations

from typing import Any

import torch

from tests.interop.parity.batches import batch, ints
from tests.interop.parity.cases import category, raised
from tests.interop.parity.indexed import placed, some_rows

case = category("client", live=True)


@case
def keys_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, fields=some_rows(3), tags=[{"i": i} for i in range(3)])
    whole = client.kv_retrieve_meta(["a", "b", "c"], p)
    part = client.kv_retrieve_meta(["c", "absent", "a"], p)
    return [placed(whole, whole), placed(part, whole), client.get_data(part)]


@case
def a_key_twice_to_rows(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], p, fields=some_rows(2))
    twice = client.kv_retrieve_meta(["b", "a", "b"], p)
    return placed(twice, twice)


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
    return [placed(filled, filled), tq.kv_list(p), tq.kv_batch_get(["b", "a"], p)]


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
    return placed(meta, meta)


@case
def rows_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, tags=[{}, {}, {}])
    indexes = client.kv_retrieve_meta(["c", "a"], p).global_indexes
    return [client.kv_retrieve_keys(indexes, p), client.kv_retrieve_keys(indexes[0], p)]


@case
def rows_without_keys_to_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(some_rows(2), partition_id=p)
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
def rows_with_and_without_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(some_rows(2), partition_id=p)
    tq.kv_put("a", p, fields={"n": torch.tensor(9), "v": ints(9)}, tag={"x": 1})
    meta = client.get_meta(["n"], 3, p, task_name="train")
    return [client.get_data(meta), meta.custom_meta, tq.kv_list(p)]
