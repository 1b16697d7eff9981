"""Cases of KVBatchMeta alone: nothing here needs a plane."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

from tests.interop.parity.cases import category, raised

case = category("KVBatchMeta", live=False)


def _meta(tq: Any, n: int, start: int = 0, **rest: Any) -> Any:
    keys = [f"k{i}" for i in range(start, start + n)]
    given = {"partition_id": "p", "fields": ["x", "y"], "extra_info": {"step": 1}, **rest}
    return tq.KVBatchMeta(keys=keys, tags=[{"i": i} for i in range(start, start + n)], **given)


@case
def nothing_given(tq: Any) -> Any:
    return tq.KVBatchMeta()


@case
def all_given(tq: Any) -> Any:
    return [_meta(tq, 3), tq.KVBatchMeta(["a"], [{"t": 1}], "p", ["f"], {"e": 2})]


@case
def lengths_that_differ(tq: Any) -> Any:
    return raised(tq.KVBatchMeta, keys=["a", "b"], tags=[{}])


@case
def keys_without_tags(tq: Any) -> Any:
    return raised(tq.KVBatchMeta, keys=["a"])


@case
def a_key_twice(tq: Any) -> Any:
    return raised(tq.KVBatchMeta, keys=["a", "a"], tags=[{}, {}])


@case
def a_field_twice(tq: Any) -> Any:
    return raised(tq.KVBatchMeta, keys=["a"], tags=[{}], fields=["x", "x"])


@case
def an_argument_that_is_not_known(tq: Any) -> Any:
    return raised(tq.KVBatchMeta, keys=[], tags=[], rows=3)


@case
def tags_and_extra_info_are_copied(tq: Any) -> Any:
    tags, extra, keys = [{"inner": [1]}], {"inner": [1]}, ["a"]
    meta = tq.KVBatchMeta(keys=keys, tags=tags, extra_info=extra)
    tags[0]["inner"].append(2)
    extra["inner"].append(2)
    return [meta, meta.keys is keys]


@case
def extra_info_may_be_none(tq: Any) -> Any:
    return tq.KVBatchMeta(keys=["a"], tags=[{}], extra_info=None)


@case
def attributes_are_assigned(tq: Any) -> Any:
    meta = _meta(tq, 2)
    meta.fields = ["z"]
    meta.partition_id = "q"
    meta.tags = [{"new": 1}, {"new": 2}]
    meta.extra_info["more"] = True
    return meta


@case
def select_in_another_order(tq: Any) -> Any:
    return _meta(tq, 4).select_keys(["k3", "k0"])


@case
def select_none(tq: Any) -> Any:
    return _meta(tq, 2).select_keys([])


@case
def select_a_key_twice(tq: Any) -> Any:
    return raised(_meta(tq, 2).select_keys, ["k0", "k0"])


@case
def select_an_unknown_key(tq: Any) -> Any:
    return raised(_meta(tq, 2).select_keys, ["k0", "k9"])


@case
def what_is_selected_is_apart(tq: Any) -> Any:
    meta = _meta(tq, 2)
    part = meta.select_keys(["k1"])
    part.tags[0]["i"] = 99
    part.extra_info["step"] = 99
    return [meta, part]


@case
def reorder_in_place(tq: Any) -> Any:
    meta = _meta(tq, 4)
    return [meta.reorder([2, 0, 3, 1]), meta]


@case
def reorder_with_negative_indexes(tq: Any) -> Any:
    meta = _meta(tq, 3)
    return [raised(meta.reorder, [-1, 0, 1]), meta]


@case
def reorder_too_few(tq: Any) -> Any:
    meta = _meta(tq, 3)
    return [raised(meta.reorder, [0, 1]), meta]


@case
def reorder_an_index_twice(tq: Any) -> Any:
    meta = _meta(tq, 3)
    return [raised(meta.reorder, [0, 1, 1]), meta]


@case
def reorder_out_of_range(tq: Any) -> Any:
    meta = _meta(tq, 3)
    return [raised(meta.reorder, [0, 1, 3]), meta]


@case
def chunk_evenly(tq: Any) -> Any:
    return _meta(tq, 6).chunk(3)


@case
def chunk_with_a_rest(tq: Any) -> Any:
    return _meta(tq, 7).chunk(3)


@case
def chunk_into_more_than_there_are(tq: Any) -> Any:
    return _meta(tq, 2).chunk(4)


@case
def chunk_of_nothing(tq: Any) -> Any:
    return tq.KVBatchMeta().chunk(2)


@case
def chunk_into_none(tq: Any) -> Any:
    return raised(_meta(tq, 2).chunk, 0)


@case
def concat_of_chunks(tq: Any) -> Any:
    return tq.KVBatchMeta.concat(_meta(tq, 7).chunk(3))


@case
def concat_of_nothing(tq: Any) -> Any:
    return [tq.KVBatchMeta.concat([]), tq.KVBatchMeta.concat([tq.KVBatchMeta()])]


@case
def concat_skips_the_empty(tq: Any) -> Any:
    return tq.KVBatchMeta.concat(
        [tq.KVBatchMeta(), _meta(tq, 1), tq.KVBatchMeta(), _meta(tq, 1, 5)]
    )


@case
def concat_of_two_partitions(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 1), _meta(tq, 1, 5, partition_id="q")])


@case
def concat_of_two_field_lists(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 1), _meta(tq, 1, 5, fields=["x"])])


@case
def concat_of_fields_in_another_order(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 1), _meta(tq, 1, 5, fields=["y", "x"])])


@case
def concat_of_none_and_a_field_list(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 1, fields=None), _meta(tq, 1, 5)])


@case
def concat_of_a_field_list_and_none(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 1), _meta(tq, 1, 5, fields=None)])


@case
def concat_with_a_key_twice(tq: Any) -> Any:
    return raised(tq.KVBatchMeta.concat, [_meta(tq, 2), _meta(tq, 2, 1)])


@case
def concat_unites_extra_info(tq: Any) -> Any:
    parts = [_meta(tq, 1, extra_info={"a": 1}), _meta(tq, 1, 5, extra_info={"b": [2], "a": 1})]
    return tq.KVBatchMeta.concat(parts)


@case
def concat_of_extra_info_that_differs(tq: Any) -> Any:
    parts = [_meta(tq, 1, extra_info={"a": 1}), _meta(tq, 1, 5, extra_info={"a": 2})]
    return raised(tq.KVBatchMeta.concat, parts)


@case
def concat_without_extra_info(tq: Any) -> Any:
    parts = [_meta(tq, 1, extra_info={}), _meta(tq, 1, 5, extra_info={})]
    return tq.KVBatchMeta.concat(parts)


@case
def a_pickle(tq: Any) -> Any:
    meta = pickle.loads(pickle.dumps(_meta(tq, 3)))  # noqa: S301  (its own, of this process)
    meta.reorder([1, 0, 2])
    return meta


@case
def the_module_of_the_class(tq: Any) -> Any:
    return [tq.KVBatchMeta.__module__, tq.KVBatchMeta.__qualname__, tq.BatchMeta.__module__]


@case
def a_deep_copy(tq: Any) -> Any:
    meta = _meta(tq, 2)
    other = copy.deepcopy(meta)
    other.tags[0]["i"] = 99
    return [meta, other]


@case
def as_a_dataclass(tq: Any) -> Any:
    meta = _meta(tq, 2)
    return {
        "is": dataclasses.is_dataclass(meta),
        "fields": [field.name for field in dataclasses.fields(tq.KVBatchMeta)],
        "as dict": dataclasses.asdict(meta),
        "replaced": dataclasses.replace(meta, partition_id="q"),
    }


@case
def equality(tq: Any) -> Any:
    return [_meta(tq, 2) == _meta(tq, 2), _meta(tq, 2) == _meta(tq, 2, 1), _meta(tq, 2) == 3]


@case
def as_text(tq: Any) -> Any:
    return str(_meta(tq, 2))


@case
def truth(tq: Any) -> Any:
    return [bool(tq.KVBatchMeta()), bool(_meta(tq, 1)), raised(hash, _meta(tq, 1))]
