"""Cases of the low-level client: what tasks claim, and what is produced and consumed."""

from __future__ import annotations

from typing import Any

from tests.interop.parity.batches import batch, ints
from tests.interop.parity.cases import category, raised
from tests.interop.parity.indexed import in_order, placed, some_rows, status_of

case = category("client", live=True)


@case
def a_claim(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(4), partition_id=p)
    meta = client.get_meta(["n"], 2, p, task_name="train")
    return [placed(meta, made), client.get_data(meta)]


@case
def claims_never_give_a_row_twice(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(5), partition_id=p)
    claims = [client.get_meta(["n", "v"], 2, p, task_name="train") for _ in range(3)]
    return [placed(meta, made) for meta in claims]


@case
def tasks_claim_apart(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(3), partition_id=p)
    claims = [client.get_meta(["n"], 3, p, task_name=task) for task in ("one", "two", "one")]
    return [placed(meta, made)["global_indexes"] for meta in claims]


@case
def a_claim_of_more_than_is_ready(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(2), partition_id=p)
    short = client.get_meta(["n"], 3, p, task_name="train")
    return [short, placed(client.get_meta(["n"], 2, p, task_name="train"), made)["global_indexes"]]


@case
def a_claim_of_a_field_that_fills_up(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(3), partition_id=p)
    client.put(batch(score=ints(1, 2)), made.select_samples([2, 0]))
    claims = [client.get_meta(["n", "score"], 2, p, task_name="train")]
    client.put(batch(score=ints(3)), made.select_samples([1]))
    claims.append(client.get_meta(["n", "score"], 1, p, task_name="train"))
    return [[placed(meta, made) for meta in claims], [client.get_data(meta) for meta in claims]]


@case
def a_claim_in_an_unknown_partition(tq: Any, p: str) -> Any:
    return tq.get_client().get_meta(["n"], 1, p, task_name="train")


@case
def a_claim_without_a_task(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(some_rows(2), partition_id=p)
    return raised(client.get_meta, ["n"], 1, p)


@case
def an_unknown_mode(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(some_rows(2), partition_id=p)
    return raised(client.get_meta, ["n"], 1, p, mode="peek", task_name="train")


@case
def a_fetch_of_everything(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(3), partition_id=p)
    client.get_meta(["n"], 2, p, task_name="train")
    whole = in_order(client.get_meta(["n"], 3, p, mode="force_fetch"))
    left = client.get_meta(["n"], 1, p, task_name="train")
    return [placed(whole, made), placed(left, made)["global_indexes"]]


@case
def a_fetch_of_everything_with_rows_that_are_not_ready(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(2), partition_id=p)
    empty = client.get_meta(["n"], 1, p, mode="insert")
    whole = in_order(client.get_meta(["n"], 3, p, mode="force_fetch"))
    return placed(whole, made.global_indexes + empty.global_indexes)


@case
def a_fetch_of_a_field_that_some_rows_have(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(3), partition_id=p)
    client.put(batch(score=ints(1)), made.select_samples([1]))
    whole = client.get_meta(["score"], 3, p, mode="force_fetch")
    return placed(in_order(whole), made)


@case
def consumption(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(3), partition_id=p)
    before = status_of(client.get_consumption_status("train", p), made)
    client.get_meta(["n"], 2, p, task_name="train")
    after = status_of(client.get_consumption_status("train", p), made)
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
    made = client.put(some_rows(3), partition_id=p)
    client.put(batch(score=ints(1, 2)), made.select_samples([0, 2]))
    wanted = (["n"], ["n", "v"], ["score"], ["n", "score"], ["unknown"])
    return [
        [status_of(client.get_production_status(f, p), made), client.check_production_status(f, p)]
        for f in wanted
    ]


@case
def production_of_an_unknown_partition(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [client.get_production_status(["n"], p), client.check_production_status(["n"], p)]


@case
def consumption_is_forgotten(tq: Any, p: str) -> Any:
    client = tq.get_client()
    made = client.put(some_rows(2), partition_id=p)
    for task in ("one", "two"):
        client.get_meta(["n"], 2, p, task_name=task)
    said = [client.reset_consumption(p, "one")]
    said += [client.check_consumption_status(task, p) for task in ("one", "two")]
    again = client.get_meta(["n"], 2, p, task_name="one")
    said += [client.reset_consumption(p), client.check_consumption_status("two", p)]
    return [said, placed(again, made)["global_indexes"]]


@case
def consumption_of_an_unknown_partition_is_forgotten(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [raised(client.reset_consumption, p), raised(client.reset_consumption, p, "train")]


@case
def claims_of_rows_with_keys(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["b", "a", "c"], p, fields=some_rows(3), tags=[{"i": i} for i in range(3)])
    meta = client.get_meta(["n"], 2, p, task_name="train")
    return [
        client.kv_retrieve_keys(meta.global_indexes, p),
        meta.custom_meta,
        client.get_data(meta),
    ]
