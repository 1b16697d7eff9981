"""Cases of refusals: which type is raised, and what is left behind."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tests.interop.parity.batches import batch, ints, jagged
from tests.interop.parity.cases import category, raised, says

case = category("errors", live=True)


def _refused(tq: Any, p: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The error, beside what the partition holds after it."""
    return {"error": raised(function, *args, **kwargs), "left": tq.kv_list(p)}


@case
def one_put_of_nothing(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p)


@case
def a_put_of_nothing(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a"], p)


@case
def a_put_of_no_keys(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, [], p, tags=[])


@case
def a_key_that_is_a_number(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", 1], p, tags=[{}, {}])


@case
def one_key_that_is_a_number(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, 1, p, tag={})


@case
def keys_in_a_tuple(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ("a", "b"), p, tags=[{}, {}])


@case
def too_few_tags(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", "b"], p, tags=[{"i": 0}])


@case
def too_many_rows(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a"], p, fields=batch(x=ints(1, 2)))


@case
def too_few_tags_beside_rows(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", "b"], p, fields=batch(x=ints(1, 2)), tags=[{}])


@case
def a_key_twice_with_tags(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", "a"], p, tags=[{"i": 0}, {"i": 1}])


@case
def a_key_twice_with_values(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", "a"], p, fields=batch(x=ints(1, 2)))


@case
def fields_that_are_a_list(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p, fields=[1, 2])


@case
def fields_that_are_a_tensor(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p, fields=torch.ones(1))


@case
def a_nested_tensor_in_one_put(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p, fields={"x": jagged([1], [2, 3])})


@case
def two_rows_in_one_put(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p, fields=batch(x=ints(1, 2)))


@case
def a_dict_for_several_keys(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a", "b"], p, fields={"x": ints(1, 2)})


@case
def a_batch_without_fields(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a"], p, fields=TensorDict({}, batch_size=[1]))


@case
def a_batch_without_rows(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_batch_put, ["a"], p, fields=TensorDict({}, batch_size=[]))


@case
def a_tag_that_is_text(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_put, "a", p, tag="running")


@case
def a_get_of_nothing(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    return raised(tq.kv_batch_get, [], p)


@case
def a_get_of_unknown_keys(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    return says(lambda: tq.kv_batch_get(["b", "c"], p), "keys or partition were not found")


@case
def a_get_of_an_unknown_partition(tq: Any, p: str) -> Any:
    return says(lambda: tq.kv_batch_get("a", p + "/x"), "keys or partition were not found")


@case
def a_get_of_keys_with_tags_only(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{}, {}])
    return says(lambda: tq.kv_batch_get(["a", "b"], p), "not ready")


@case
def a_get_of_a_field_of_keys_with_tags_only(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{}, {}])
    return raised(tq.kv_batch_get, ["a", "b"], p, ["x"])


@case
def a_get_of_keys_that_share_no_field(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    tq.kv_put("b", p, fields={"y": ints(1)})
    return says(lambda: tq.kv_batch_get(["a", "b"], p), "not ready")


@case
def a_get_of_a_numbered_key(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    return [raised(tq.kv_batch_get, 1, p), raised(tq.kv_batch_get, ["a", 1], p)]


@case
def a_get_of_keys_in_a_tuple(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    return raised(tq.kv_batch_get, ("a",), p)


@case
def by_meta_without_a_partition(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    return raised(tq.kv_batch_get_by_meta, tq.KVBatchMeta(keys=["a"], tags=[{}], fields=["x"]))


@case
def by_meta_with_another_field(tq: Any, p: str) -> Any:
    meta = tq.kv_put("a", p, fields={"x": ints(1)})
    return says(lambda: tq.kv_batch_get_by_meta(meta, ["x", "y"]), "select_fields", "not found")


@case
def by_meta_without_a_field_list(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    meta = tq.KVBatchMeta(keys=["a"], tags=[{}], partition_id=p)
    return raised(tq.kv_batch_get_by_meta, meta, ["x"])


@case
def by_meta_of_cleared_keys(tq: Any, p: str) -> Any:
    meta = tq.kv_put("a", p, fields={"x": ints(1)})
    tq.kv_clear("a", p)
    return raised(tq.kv_batch_get_by_meta, meta)


@case
def by_meta_of_tags_only(tq: Any, p: str) -> Any:
    meta = tq.kv_put("a", p, tag={"x": 1})
    return raised(tq.kv_batch_get_by_meta, meta)


@case
def by_an_empty_meta(tq: Any, p: str) -> Any:
    return raised(tq.kv_batch_get_by_meta, tq.KVBatchMeta(partition_id=p))


@case
def a_clear_of_no_keys(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={})
    return _refused(tq, p, tq.kv_clear, [], p)


@case
def a_clear_of_unknown_keys(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, tag={})
    return _refused(tq, p, tq.kv_clear, ["b", "c"], p)


@case
def a_clear_in_an_unknown_partition(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_clear, ["a"], p)


@case
def a_clear_of_known_and_unknown_keys(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, tags=[{}, {}])
    return _refused(tq, p, tq.kv_clear, ["x", "b"], p)


@case
def a_clear_twice(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    tq.kv_clear(["a"], p)
    return _refused(tq, p, tq.kv_clear, "a", p)


@case
def a_clear_of_a_numbered_key(tq: Any, p: str) -> Any:
    return _refused(tq, p, tq.kv_clear, [1], p)


@case
def a_clear_of_a_key_twice(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    return _refused(tq, p, tq.kv_clear, ["a", "a"], p)


@case
def a_parser_that_fails(tq: Any, p: str) -> Any:
    def parser(fields: Any) -> Any:
        raise KeyError("no such file")

    rows = batch(x=ints(1, 2))
    return _refused(tq, p, tq.kv_batch_put, ["a", "b"], p, fields=rows, data_parser=parser)


@case
def a_parser(tq: Any, p: str) -> Any:
    def parser(fields: Any) -> Any:
        return {name: column * 2 for name, column in fields.items()}

    def put_and_get() -> Any:
        tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)), data_parser=parser)
        return tq.kv_batch_get(["a", "b"], p)

    return raised(put_and_get)


@case
def an_argument_that_is_not_known(tq: Any, p: str) -> Any:
    return raised(tq.kv_put, "a", p, tag={}, ttl=3)


@case
def a_module_name_that_is_not_known(tq: Any, p: str) -> Any:
    return raised(lambda: tq.kv_rename)


@case
def a_checkpoint_that_is_not_there(tq: Any, p: str) -> Any:
    return raised(tq.load_checkpoint, "/nonexistent/checkpoint")
