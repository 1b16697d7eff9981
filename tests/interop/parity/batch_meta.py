"""Cases of BatchMeta alone: nothing here needs a plane."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from tests.interop.parity.batches import batch, ints, jagged, objects
from tests.interop.parity.cases import category, raised

case = category("BatchMeta", live=False)


def _schema(n: int) -> dict[str, dict[str, Any]]:
    flat = {"dtype": torch.int64, "shape": (), "is_nested": False, "is_non_tensor": False}
    ragged = {
        "dtype": torch.float32, "shape": None, "is_nested": True, "is_non_tensor": False,
        "per_sample_shapes": [(i + 1,) for i in range(n)],
    }  # fmt: skip
    return {"b": ragged, "a": flat}


def _meta(tq: Any, n: int, start: int = 0, *, ready: bool = True, **rest: Any) -> Any:
    given: dict[str, Any] = {
        "partition_ids": ["p"] * n, "field_schema": _schema(n),
        "production_status": np.full(n, int(ready), dtype=np.int8),
        "extra_info": {"step": 1}, "custom_meta": [{"i": i} for i in range(n)],
    }  # fmt: skip
    return tq.BatchMeta(list(range(start, start + n)), **{**given, **rest})


@case
def nothing_given(tq: Any) -> Any:
    return raised(tq.BatchMeta)


@case
def indexes_alone(tq: Any) -> Any:
    return tq.BatchMeta([5, 3], ["p", "p"])


@case
def all_given(tq: Any) -> Any:
    return _meta(tq, 3)


@case
def the_empty_one(tq: Any) -> Any:
    return [tq.BatchMeta.empty(), tq.BatchMeta.empty({"a": 1}), tq.BatchMeta([], [])]


@case
def lengths_that_differ(tq: Any) -> Any:
    status = np.ones(3, dtype=np.int8)
    return [
        raised(tq.BatchMeta, [1, 2], ["p"]),
        raised(tq.BatchMeta, [1, 2], ["p", "p"], production_status=status),
        raised(tq.BatchMeta, [1, 2], ["p", "p"], custom_meta=[{}]),
        raised(tq.BatchMeta, [1, 2], ["p", "p"], field_schema=_schema(3)),
    ]


@case
def readiness(tq: Any) -> Any:
    some = _meta(tq, 2, production_status=np.array([1, 0], dtype=np.int8))
    metas = [_meta(tq, 2), _meta(tq, 2, ready=False), some, tq.BatchMeta.empty()]
    return [meta.is_ready for meta in metas]


@case
def what_is_given_is_copied(tq: Any) -> Any:
    indexes, extra, status = [1, 2], {"a": 1}, np.ones(2, dtype=np.int8)
    meta = tq.BatchMeta(indexes, ["p", "p"], production_status=status, extra_info=extra)
    indexes.append(3)
    extra["b"] = 2
    status[:] = 0
    return meta


@case
def views_of_rows(tq: Any) -> Any:
    rows = _meta(tq, 3).samples
    return [len(rows)] + [
        {
            "index": row.global_index,
            "partition": row.partition_id,
            "status": row.production_status,
            "custom": dict(row.custom_meta),
            "fields": {name: dict(field) for name, field in row.fields.items()},
        }
        for row in rows
    ]


@case
def views_are_read_only(tq: Any) -> Any:
    row = _meta(tq, 2).samples[1]

    def write() -> None:
        row.custom_meta["new"] = 1

    def assign() -> None:
        row.global_index = 7

    return [raised(write), raised(assign)]


@case
def dtypes_and_shapes(tq: Any) -> Any:
    meta = _meta(tq, 2)
    return [meta.get_dtypes("a"), meta.get_shapes("a"), meta.get_dtypes("b"), meta.get_shapes("b")]


@case
def dtypes_and_shapes_of_an_unknown_field(tq: Any) -> Any:
    meta = _meta(tq, 2)
    return [raised(meta.get_dtypes, "z"), raised(meta.get_shapes, "z")]


@case
def extra_info(tq: Any) -> Any:
    meta = _meta(tq, 1)
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2, "step": 9})
    every = meta.get_all_extra_info()
    every["a"].append(2)
    said = [
        meta.get_extra_info("a"), meta.get_extra_info("z"), meta.get_extra_info("z", 5),
        meta.has_extra_info("b"), meta.has_extra_info("z"), meta.remove_extra_info("b"),
        meta.remove_extra_info("z"), dict(meta.extra_info),
    ]  # fmt: skip
    meta.clear_extra_info()
    return [*said, meta.extra_info]


@case
def custom_meta(tq: Any) -> Any:
    meta = _meta(tq, 2)
    meta.update_custom_meta([{"i": 10}, {"new": 1}])
    every = meta.get_all_custom_meta()
    every[0]["i"] = 99
    said = [every, [dict(row) for row in meta.custom_meta], meta.update_custom_meta(None)]
    meta.clear_custom_meta()
    return [*said, meta.custom_meta]


@case
def custom_meta_of_another_length(tq: Any) -> Any:
    return raised(_meta(tq, 2).update_custom_meta, [{}])


@case
def fields_are_added(tq: Any) -> Any:
    meta = tq.BatchMeta([0, 1], ["p", "p"])
    rows = batch(
        n=ints(1, 2), m=torch.ones(2, 3), r=jagged([1], [2, 3]), s=objects("one", "two"),
        t=torch.ones(2, 2, 2, dtype=torch.bfloat16),
    )  # fmt: skip
    return [meta.add_fields(rows), meta]


@case
def fields_are_added_but_not_ready(tq: Any) -> Any:
    return tq.BatchMeta([0, 1], ["p", "p"]).add_fields(batch(n=ints(1, 2)), set_all_ready=False)


@case
def fields_of_another_length(tq: Any) -> Any:
    return raised(_meta(tq, 2).add_fields, batch(n=ints(1, 2, 3)))


@case
def fields_that_are_there_already(tq: Any) -> Any:
    return _meta(tq, 2).add_fields(batch(a=torch.ones(2, 4)))


@case
def rows_selected(tq: Any) -> Any:
    meta = _meta(tq, 4)
    return [meta.select_samples([3, 1]), meta.select_samples([]), meta.select_samples([0, 0])]


@case
def rows_selected_out_of_range(tq: Any) -> Any:
    return [raised(_meta(tq, 2).select_samples, [2]), raised(_meta(tq, 2).select_samples, [-1])]


@case
def what_is_selected_is_apart(tq: Any) -> Any:
    meta = _meta(tq, 2)
    part = meta.select_samples([0])
    part.custom_meta[0]["i"] = 99
    part.set_extra_info("step", 99)
    part.production_status[0] = 0
    return [meta, part]


@case
def fields_selected(tq: Any) -> Any:
    meta = _meta(tq, 2)
    return [meta.select_fields(["a"]), meta.select_fields(["z", "b", "a"]), meta.select_fields([])]


@case
def copies(tq: Any) -> Any:
    meta = _meta(tq, 2)
    other = meta.copy()
    other.custom_meta[0]["i"] = 99
    other.global_indexes[0] = 77
    return [meta, other]


@case
def by_one_index(tq: Any) -> Any:
    meta = _meta(tq, 3)
    return [meta[0], meta[-1], meta[np.int64(1)]]


@case
def by_a_slice(tq: Any) -> Any:
    meta = _meta(tq, 5)
    return [meta[1:3], meta[::-2], meta[3:], meta[4:1]]


@case
def by_a_wrong_index(tq: Any) -> Any:
    meta = _meta(tq, 2)
    return [
        raised(meta.__getitem__, 2),
        raised(meta.__getitem__, -3),
        raised(meta.__getitem__, "a"),
    ]


@case
def rows_in_a_loop(tq: Any) -> Any:
    return [meta.global_indexes for meta in _meta(tq, 3, 7)]


@case
def chunks(tq: Any) -> Any:
    return [_meta(tq, 7).chunk(3), _meta(tq, 2).chunk(3)]


@case
def chunks_by_partition(tq: Any) -> Any:
    meta = _meta(tq, 5, partition_ids=["p", "q", "p", "r", "q"])
    return meta.chunk_by_partition()


@case
def a_union(tq: Any) -> Any:
    one = _meta(tq, 2)
    status = np.array([1, 0], dtype=np.int8)
    schema = {"a": {"dtype": torch.bool, "shape": (2,)}, "c": {"dtype": torch.int8, "shape": ()}}
    two = _meta(
        tq, 2, field_schema=schema, production_status=status, extra_info={"step": 2, "b": 1},
        custom_meta=[{"j": 1}, {"i": 5}],
    )  # fmt: skip
    return [one.union(two), one]


@case
def a_union_with_nothing(tq: Any) -> Any:
    return [_meta(tq, 1).union(tq.BatchMeta.empty()), tq.BatchMeta.empty().union(_meta(tq, 1))]


@case
def a_union_of_other_rows(tq: Any) -> Any:
    one = _meta(tq, 2)
    other = _meta(tq, 2, partition_ids=["q", "q"])
    return [
        raised(one.union, _meta(tq, 2, 1)),
        raised(one.union, other),
        raised(one.union, _meta(tq, 3)),
    ]


@case
def a_concat_of_chunks(tq: Any) -> Any:
    return tq.BatchMeta.concat(_meta(tq, 7).chunk(3))


@case
def a_concat_of_nothing(tq: Any) -> Any:
    return [tq.BatchMeta.concat([]), tq.BatchMeta.concat([tq.BatchMeta.empty(), _meta(tq, 1)])]


@case
def a_concat_of_other_fields(tq: Any) -> Any:
    parts = [_meta(tq, 1), _meta(tq, 1, 5).select_fields(["a"])]
    return [raised(tq.BatchMeta.concat, parts), tq.BatchMeta.concat(parts, validate=False)]


@case
def a_concat_of_other_dtypes(tq: Any) -> Any:
    one = tq.BatchMeta([0], ["p"]).add_fields(batch(x=ints(1)))
    two = tq.BatchMeta([1], ["p"]).add_fields(batch(x=torch.ones(1)))
    return raised(tq.BatchMeta.concat, [one, two])


@case
def a_concat_of_dense_and_ragged(tq: Any) -> Any:
    one = tq.BatchMeta([0, 1], ["p", "p"]).add_fields(batch(x=torch.ones(2, 3)))
    ragged = jagged([1], [2, 3], dtype=torch.float32)
    two = tq.BatchMeta([2, 3], ["p", "p"]).add_fields(batch(x=ragged))
    return [tq.BatchMeta.concat([one, two]), tq.BatchMeta.concat([two, one])]


@case
def a_concat_of_extra_info(tq: Any) -> Any:
    one, two = _meta(tq, 1, extra_info={"a": 1}), _meta(tq, 1, 5, extra_info={"b": 2})
    three = _meta(tq, 1, 6, extra_info={"a": 3})
    return [tq.BatchMeta.concat([one, two]), raised(tq.BatchMeta.concat, [one, three])]


@case
def a_concat_of_partitions(tq: Any) -> Any:
    return tq.BatchMeta.concat([_meta(tq, 1), _meta(tq, 1, 5, partition_ids=["q"])])


@case
def reorder_in_place(tq: Any) -> Any:
    meta = _meta(tq, 3, 4)
    return [meta.reorder([2, 0, 1]), meta]


@case
def reorder_with_wrong_indexes(tq: Any) -> Any:
    wrong = ([0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1])
    meta = _meta(tq, 3)
    return [*[raised(meta.reorder, indexes) for indexes in wrong], meta]


@case
def a_pickle(tq: Any) -> Any:
    meta = pickle.loads(pickle.dumps(_meta(tq, 3)))  # noqa: S301  (its own, of this process)
    meta.production_status[0] = 0
    return meta


@case
def as_text(tq: Any) -> Any:
    return str(_meta(tq, 2))


@case
def truth(tq: Any) -> Any:
    return [bool(tq.BatchMeta.empty()), bool(_meta(tq, 1)), len(_meta(tq, 4))]


@case
def names_that_are_not_there(tq: Any) -> Any:
    def assign() -> None:
        _meta(tq, 1).new = 1

    return [raised(lambda: _meta(tq, 1).rows), raised(assign)]
