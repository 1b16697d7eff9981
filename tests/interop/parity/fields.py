"""Cases of fields: which come back, in which order, for which keys."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from tests.interop.parity.batches import batch, ints, jagged, objects
from tests.interop.parity.cases import category, raised

case = category("fields", live=True)


def _three(tq: Any, p: str) -> Any:
    """Keys a, b, c, each with x, y and text."""
    rows = batch(
        x=ints(1, 2, 3), y=jagged([1], [2, 2], [3, 3, 3]), text=objects("one", "two", "three")
    )
    return tq.kv_batch_put(["a", "b", "c"], p, fields=rows, tags=[{"i": i} for i in range(3)])


@case
def all_of_one_put(tq: Any, p: str) -> Any:
    return [_three(tq, p), tq.kv_batch_get(["a", "b", "c"], p)]


@case
def one_by_its_name(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b", "c"], p, "y")


@case
def one_in_a_list(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b", "c"], p, select_fields=["text"])


@case
def several_in_another_order(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b", "c"], p, ["y", "x"])


@case
def a_name_twice(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b"], p, ["x", "x", "y"])


@case
def an_unknown_name_is_left_out(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b"], p, ["unknown", "x"])


@case
def only_unknown_names(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b"], p, ["unknown", "neither"])


@case
def no_names(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["a", "b"], p, [])


@case
def what_all_the_keys_have(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a"], p, fields=batch(x=ints(1), y=ints(2)))
    tq.kv_batch_put(["b"], p, fields=batch(y=ints(3), z=ints(4)))
    return [tq.kv_batch_get(["a", "b"], p), tq.kv_batch_get(["a"], p), tq.kv_batch_get(["b"], p)]


@case
def a_name_that_one_key_lacks_is_left_out(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a"], p, fields=batch(x=ints(1), y=ints(2)))
    tq.kv_batch_put(["b"], p, fields=batch(y=ints(3)))
    return tq.kv_batch_get(["a", "b"], p, ["x", "y"])


@case
def a_key_with_tags_only_among_others(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a"], p, fields=batch(x=ints(1)))
    tq.kv_put("t", p, tag={"x": 1})
    return raised(tq.kv_batch_get, ["a", "t"], p, ["x"])


@case
def a_put_answers_with_sorted_names(tq: Any, p: str) -> Any:
    return tq.kv_batch_put(["a"], p, fields=batch(zeta=ints(1), alpha=ints(2), mid=ints(3)))


@case
def puts_add_up(tq: Any, p: str) -> Any:
    first = tq.kv_batch_put(["a", "b"], p, fields=batch(m=ints(1, 2)))
    second = tq.kv_batch_put(["a", "b"], p, fields=batch(z=ints(1, 2)))
    third = tq.kv_batch_put(["b", "a"], p, fields=batch(a=ints(1, 2)))
    return [first.fields, second.fields, third.fields, tq.kv_batch_get(["a", "b"], p)]


@case
def a_put_answers_with_what_its_keys_share(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    tq.kv_batch_put(["b"], p, fields=batch(y=ints(1)))
    both = tq.kv_batch_put(["a", "b"], p, tags=[{}, {}])
    new = tq.kv_batch_put(["b", "c"], p, fields=batch(z=ints(1, 2)))
    return [both.fields, new.fields]


@case
def an_earlier_field_stays(tq: Any, p: str) -> Any:
    _three(tq, p)
    tq.kv_batch_put(["b"], p, fields=batch(x=ints(20)))
    return tq.kv_batch_get(["a", "b", "c"], p)


@case
def some_rows_of_a_ragged_field_overwritten(tq: Any, p: str) -> Any:
    _three(tq, p)
    tq.kv_batch_put(["c", "a"], p, fields=batch(y=jagged([7, 7], [8, 8, 8, 8])))
    return tq.kv_batch_get(["a", "b", "c"], p, "y")


@case
def a_field_that_fills_up(tq: Any, p: str) -> Any:
    _three(tq, p)
    before = tq.kv_batch_put(["a", "b"], p, fields=batch(late=ints(1, 2)))
    partly = tq.kv_batch_get(["a", "b", "c"], p, ["late", "x"])
    after = tq.kv_batch_put(["c"], p, fields=batch(late=ints(3)))
    return [before.fields, partly, after.fields, tq.kv_batch_get(["a", "b", "c"], p, ["late", "x"])]


@case
def rows_in_the_order_asked(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["c", "a", "b"], p)


@case
def a_key_twice(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["b", "a", "b"], p, ["x", "y", "text"])


@case
def a_missing_key_is_left_out(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get(["c", "absent", "a"], p)


@case
def one_key_as_text(tq: Any, p: str) -> Any:
    _three(tq, p)
    return tq.kv_batch_get("b", p)


@case
def by_meta(tq: Any, p: str) -> Any:
    return tq.kv_batch_get_by_meta(_three(tq, p))


@case
def by_meta_some(tq: Any, p: str) -> Any:
    meta = _three(tq, p)
    return [tq.kv_batch_get_by_meta(meta, ["y", "x"]), tq.kv_batch_get_by_meta(meta, "text")]


@case
def by_meta_turned_and_cut(tq: Any, p: str) -> Any:
    meta = _three(tq, p)
    meta.reorder([2, 0, 1])
    parts = meta.chunk(2)
    joined = tq.KVBatchMeta.concat(parts[::-1])
    return [tq.kv_batch_get_by_meta(part, ["x"]) for part in (meta, *parts, joined)]


@case
def by_meta_of_tags_alone_after_values(tq: Any, p: str) -> Any:
    _three(tq, p)
    meta = tq.kv_batch_put(["a", "c"], p, tags=[{"late": 1}, {"late": 2}])
    return [meta, tq.kv_batch_get_by_meta(meta)]


@case
def by_meta_without_fields(tq: Any, p: str) -> Any:
    _three(tq, p)
    meta = tq.KVBatchMeta(keys=["a", "b"], tags=[{}, {}], partition_id=p)
    return tq.kv_batch_get_by_meta(meta)


@case
def by_meta_made_before_a_field(tq: Any, p: str) -> Any:
    meta = _three(tq, p)
    tq.kv_batch_put(["a", "b", "c"], p, fields=batch(new=ints(7, 8, 9)))
    return tq.kv_batch_get_by_meta(meta)


@case
def one_put_of_a_dict(tq: Any, p: str) -> Any:
    fields = {"t": torch.tensor(3), "v": ints(1, 2), "m": torch.ones(2, 3), "s": "text", "n": 5}
    return [tq.kv_put("a", p, fields=fields), tq.kv_batch_get("a", p)]


@case
def puts_of_dicts_read_together(tq: Any, p: str) -> Any:
    for i, key in enumerate(["a", "b", "c"]):
        tq.kv_put(key, p, fields={"n": torch.tensor(i), "v": torch.arange(i + 1), "s": key})
    return tq.kv_batch_get(["a", "b", "c"], p)


@case
def one_put_of_a_batch(tq: Any, p: str) -> Any:
    return [tq.kv_put("a", p, fields=batch(x=torch.ones(1, 2))), tq.kv_batch_get("a", p)]


@case
def a_row_apart_from_its_partition(tq: Any, p: str) -> Any:
    tq.kv_put("a", p + "/1", fields={"x": torch.tensor(1)})
    tq.kv_put("a", p + "/2", fields={"x": torch.tensor(2), "y": torch.tensor(3)})
    return [tq.kv_batch_get("a", p + "/1"), tq.kv_batch_get("a", p + "/2")]


@case
def after_a_clear_of_some(tq: Any, p: str) -> Any:
    _three(tq, p)
    tq.kv_clear(["b"], p)
    return tq.kv_batch_get(["a", "b", "c"], p)


@case
def after_a_clear_and_another_put(tq: Any, p: str) -> Any:
    _three(tq, p)
    tq.kv_clear(["a", "b", "c"], p)
    meta = tq.kv_batch_put(["a", "b"], p, fields=batch(fresh=ints(1, 2)))
    return [meta, tq.kv_batch_get(["a", "b"], p)]


@case
def gets_of_an_event_loop(tq: Any, p: str) -> Any:
    async def main() -> Any:
        rows = batch(x=ints(1, 2), y=jagged([1], [2, 2]))
        meta = await tq.async_kv_batch_put(["a", "b"], p, fields=rows)
        whole, part = await asyncio.gather(
            tq.async_kv_batch_get(["b", "a"], p), tq.async_kv_batch_get_by_meta(meta, ["y"])
        )
        await tq.async_kv_clear(["a"], p)
        return [meta, whole, part, await tq.async_kv_batch_get(["a", "b"], p, "x")]

    return asyncio.run(main())


@case
def many_rows(tq: Any, p: str) -> Any:
    keys = [f"k{i}" for i in range(97)]
    rows = batch(n=torch.arange(97), v=jagged(*[list(range(i % 5)) for i in range(97)]))
    meta = tq.kv_batch_put(keys, p, fields=rows)
    return [meta.fields, tq.kv_batch_get(keys[::-3], p)]
