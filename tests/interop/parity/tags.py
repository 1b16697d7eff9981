"""Cases of tags: how they merge, what a put answers, what a listing shows."""

from __future__ import annotations

import asyncio
import datetime
import math
from typing import Any

import torch

from tests.interop.parity.batches import batch, ints, objects
from tests.interop.parity.cases import category, raised

case = category("tags", live=True)


def _listed(tq: Any, p: str) -> Any:
    """The partition's tags, and its keys in their order."""
    listing = tq.kv_list(p)
    return {"listing": listing, "order": {name: list(keys) for name, keys in listing.items()}}


@case
def merge_at_the_top_level(tq: Any, p: str) -> Any:
    first = tq.kv_put("a", p, tag={"x": 1, "y": 2})
    second = tq.kv_put("a", p, tag={"y": 3, "z": 4})
    return [first, second, _listed(tq, p)]


@case
def dicts_inside_are_replaced(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={"inner": {"x": 1, "y": 2}, "rest": 0})
    return [tq.kv_put("a", p, tag={"inner": {"y": 3}}), _listed(tq, p)]


@case
def lists_are_replaced(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={"steps": [1, 2, 3]})
    return [tq.kv_put("a", p, tag={"steps": [4]}), _listed(tq, p)]


@case
def another_type_replaces(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={"x": 1, "y": "s", "z": [1]})
    return tq.kv_put("a", p, tag={"x": "one", "y": 2.5, "z": None})


@case
def none_is_a_value(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={"x": 1})
    return [tq.kv_put("a", p, tag={"x": None}), _listed(tq, p)]


@case
def a_put_of_values_alone_makes_an_empty_tag(tq: Any, p: str) -> Any:
    return [tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2))), _listed(tq, p)]


@case
def a_put_of_values_keeps_tags(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{"t": 1}, {"t": 2}])
    return [tq.kv_batch_put(["b", "a"], p, fields=batch(x=ints(1, 2))), _listed(tq, p)]


@case
def a_put_of_tags_alone_has_no_fields(tq: Any, p: str) -> Any:
    return [tq.kv_batch_put(["a", "b"], p, tags=[{"t": 1}, {"u": 2}]), _listed(tq, p)]


@case
def a_put_of_tags_answers_with_the_fields_there_are(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2), y=ints(3, 4)))
    return tq.kv_batch_put(["b"], p, tags=[{"t": 1}])


@case
def whole_tags_come_back_in_the_order_of_the_keys(tq: Any, p: str) -> Any:
    keys = [f"k{i}" for i in range(6)]
    tq.kv_batch_put(keys, p, tags=[{"i": i} for i in range(6)])
    turned = keys[::-1]
    return tq.kv_batch_put(turned, p, tags=[{"turned": key} for key in turned])


@case
def new_and_old_keys_in_one_put(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["b", "d"], p, tags=[{"old": 1}, {"old": 2}])
    meta = tq.kv_batch_put(["a", "b", "c", "d"], p, tags=[{"new": i} for i in range(4)])
    return [meta, _listed(tq, p)]


@case
def an_empty_tag_makes_a_key(tq: Any, p: str) -> Any:
    return [tq.kv_put("a", p, tag={}), tq.kv_batch_put(["b"], p, tags=[{}]), _listed(tq, p)]


@case
def an_empty_tag_changes_nothing(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={"x": 1})
    return tq.kv_put("a", p, tag={})


@case
def one_tag_with_values(tq: Any, p: str) -> Any:
    meta = tq.kv_put("a", p, fields={"x": ints(1, 2, 3)}, tag={"status": "success", "seq_len": 3})
    return [meta, _listed(tq, p)]


@case
def a_listing_is_in_the_order_of_the_first_puts(tq: Any, p: str) -> Any:
    for key in ("m", "a", "z", "b"):
        tq.kv_put(key, p, tag={"key": key})
    tq.kv_put("z", p, tag={"again": True})
    tq.kv_put("m", p, fields={"x": ints(1)})
    return _listed(tq, p)


@case
def a_listing_after_a_clear_in_the_middle(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b", "c", "d"], p, tags=[{"i": i} for i in range(4)])
    tq.kv_clear(["b", "c"], p)
    tq.kv_put("b", p, tag={"second": True})
    return _listed(tq, p)


@case
def a_listing_of_an_unknown_partition(tq: Any, p: str) -> Any:
    return tq.kv_list(p + "/unknown")


@case
def a_listing_of_a_partition_that_was_emptied(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{"i": 0}, {"i": 1}])
    tq.kv_clear(["a", "b"], p)
    return [tq.kv_list(p), tq.kv_list().get(p, "not listed")]


@case
def a_listing_of_all_partitions(tq: Any, p: str) -> Any:
    tq.kv_put("a", p + "/2", tag={"x": 1})
    tq.kv_put("a", p + "/1", fields={"v": ints(5)})
    mine = {name: keys for name, keys in tq.kv_list().items() if name.startswith(p + "/")}
    return [mine, list(mine)]


@case
def one_key_in_two_partitions(tq: Any, p: str) -> Any:
    tq.kv_put("a", p + "/1", tag={"x": 1})
    tq.kv_put("a", p + "/2", tag={"y": 2})
    return [tq.kv_list(p + "/1"), tq.kv_list(p + "/2")]


@case
def plain_values_of_every_kind(tq: Any, p: str) -> Any:
    tag = {
        "int": 7, "negative": -(2**40), "float": 0.1, "true": True, "false": False, "none": None,
        "text": "größe 长度", "empty": "", "list": [1, "two", 3.0, None, [4]],
        "dict": {"k": {"l": []}},
    }  # fmt: skip
    return [tq.kv_put("a", p, tag=tag), tq.kv_list(p)]


@case
def floats_at_the_edges(tq: Any, p: str) -> Any:
    tag = {"inf": math.inf, "minus": -math.inf, "nan": math.nan, "zero": -0.0, "tiny": 5e-324}
    return [tq.kv_put("a", p, tag=tag), tq.kv_list(p)]


@case
def whole_numbers_over_64_bits(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={"big": 2**70}), tq.kv_list(p)])


@case
def a_tuple_in_a_tag(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={"pair": (1, 2)}), tq.kv_list(p)])


@case
def bytes_in_a_tag(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={"raw": b"\x00\xff"}), tq.kv_list(p)])


@case
def a_tensor_in_a_tag(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={"t": torch.tensor(3)}), tq.kv_list(p)])


@case
def an_object_in_a_tag(tq: Any, p: str) -> Any:
    day = datetime.date(2026, 1, 2)
    return raised(lambda: [tq.kv_put("a", p, tag={"day": day}), tq.kv_list(p)])


@case
def names_of_any_text(tq: Any, p: str) -> Any:
    tag = {"with space": 1, "a.b": 2, "größe": 3, "UPPER": 4, "_private": 5}
    return [tq.kv_put("a", p, tag=tag), tq.kv_list(p)]


@case
def names_that_are_numbers(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={1: "one"}), tq.kv_list(p)])


@case
def the_drop_ins_own_tag(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("a", p, tag={"__tq__": 1}), tq.kv_list(p)])


@case
def a_key_like_the_drop_ins_own(tq: Any, p: str) -> Any:
    return raised(lambda: [tq.kv_put("__row__:7", p, tag={"x": 1}), tq.kv_list(p)])


@case
def the_drop_ins_own_partition(tq: Any, p: str) -> Any:
    name = "__transfer_queue__"
    return raised(lambda: [tq.kv_put("mine", name, tag={"x": 1}), tq.kv_list(name)])


@case
def a_long_text(tq: Any, p: str) -> Any:
    text = "0123456789" * 1_000
    meta = tq.kv_put("a", p, tag={"text": text})
    return [meta.tags[0]["text"] == text, tq.kv_list(p)[p]["a"]["text"] == text]


@case
def the_callers_tag_is_not_kept(tq: Any, p: str) -> Any:
    tag: dict[str, Any] = {"steps": [1]}
    tq.kv_put("a", p, tag=tag)
    tag["steps"].append(2)
    tag["new"] = True
    return [tag, tq.kv_list(p)]


@case
def what_a_put_answers_is_the_callers(tq: Any, p: str) -> Any:
    meta = tq.kv_put("a", p, tag={"steps": [1]})
    meta.tags[0]["steps"].append(2)
    meta.tags[0]["new"] = True
    return tq.kv_list(p)


@case
def a_cleared_key_starts_afresh(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)), tags=[{"old": 1}, {"old": 2}])
    tq.kv_clear("a", p)
    return [tq.kv_put("a", p, tag={"new": 3}), _listed(tq, p)]


@case
def verbs_of_an_event_loop(tq: Any, p: str) -> Any:
    async def main() -> Any:
        first = await tq.async_kv_put("a", p, tag={"x": 1})
        second = await tq.async_kv_batch_put(["a", "b"], p, tags=[{"y": 2}, {"y": 3}])
        return [first, second, await tq.async_kv_list(p)]

    return asyncio.run(main())


@case
def writers_of_one_key_on_one_loop(tq: Any, p: str) -> Any:
    async def main() -> Any:
        await tq.async_kv_put("a", p, tag={"start": True})
        puts = [tq.async_kv_put(f"k{i}", p, tag={"i": i}) for i in range(8)]
        metas = await asyncio.gather(*puts)
        return [[meta.keys for meta in metas], sorted((await tq.async_kv_list(p))[p])]

    return asyncio.run(main())


@case
def tags_beside_objects(tq: Any, p: str) -> Any:
    rows = batch(text=objects("one", {"two": 2}), n=ints(1, 2))
    return tq.kv_batch_put(["a", "b"], p, fields=rows, tags=[{"i": 0}, {"i": 1}])
