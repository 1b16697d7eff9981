"""Cases of shapes: what kind of container each put comes back as, with which dtype and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from tests.interop.parity.batches import batch, ints, jagged, objects, strided
from tests.interop.parity.cases import add, category, raised

case = category("shapes", live=True)

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
)  # fmt: skip


def _back(tq: Any, p: str, column: Any) -> Any:
    """A column put under keys k0, k1, … and read back; an error where the put refuses it."""

    def put_and_get() -> Any:
        rows = batch(x=column)
        keys = [f"k{i}" for i in range(rows.batch_size[0])]
        tq.kv_batch_put(keys, p, fields=rows)
        return tq.kv_batch_get(keys, p)

    return raised(put_and_get)


def _one_by_one(tq: Any, p: str, *rows: Any) -> Any:
    """Rows put one at a time and read together."""
    keys = [f"k{i}" for i in range(len(rows))]
    for key, row in zip(keys, rows, strict=True):
        tq.kv_put(key, p, fields={"x": row})
    return tq.kv_batch_get(keys, p)


def _of_dtype(dtype: torch.dtype) -> Any:
    def round_trip(tq: Any, p: str) -> Any:
        flat = torch.tensor([0, 1, 2, 1], dtype=torch.float32).to(dtype)
        scalars = _back(tq, p + "/scalars", flat)
        equal = _back(tq, p + "/equal", flat.reshape(2, 2))
        parts = [flat[:1], flat[1:]]
        ragged = _back(tq, p + "/ragged", torch.nested.nested_tensor(parts, layout=torch.jagged))
        return [scalars, equal, ragged]

    return round_trip


for _dtype in DTYPES:
    add("shapes", "dtype_" + str(_dtype).removeprefix("torch."), _of_dtype(_dtype), live=True)


@case
def one_number_per_row(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.tensor([0.5, -1.5, 2.5]))


@case
def one_number_in_brackets_per_row(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.tensor([[1], [2], [3]]))


@case
def equal_rows(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(12).reshape(3, 4))


@case
def equal_tables(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(24).reshape(2, 3, 4))


@case
def equal_blocks(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(48).reshape(2, 2, 3, 4))


@case
def ragged_rows(tq: Any, p: str) -> Any:
    return _back(tq, p, jagged([1, 2, 3], [4], [5, 6]))


@case
def ragged_tables(tq: Any, p: str) -> Any:
    return _back(tq, p, jagged(torch.arange(6).reshape(3, 2), torch.arange(2).reshape(1, 2)))


@case
def ragged_along_the_second_axis(tq: Any, p: str) -> Any:
    rows = torch.arange(12).reshape(4, 3), torch.arange(20).reshape(4, 5)
    return _back(tq, p, strided(*rows))


@case
def ragged_along_the_second_axis_as_a_view(tq: Any, p: str) -> Any:
    upright = jagged(torch.arange(12).reshape(3, 4), torch.arange(20).reshape(5, 4))
    return _back(tq, p, upright.transpose(1, 2))


@case
def ragged_along_the_third_axis(tq: Any, p: str) -> Any:
    rows = torch.arange(12).reshape(2, 2, 3), torch.arange(4).reshape(2, 2, 1)
    return _back(tq, p, strided(*rows))


@case
def ragged_along_two_axes(tq: Any, p: str) -> Any:
    return _back(tq, p, strided(torch.arange(6).reshape(2, 3), torch.arange(20).reshape(4, 5)))


@case
def strided_rows_that_differ_in_the_first_axis(tq: Any, p: str) -> Any:
    return _back(tq, p, strided(torch.arange(3), torch.arange(5)))


@case
def strided_rows_that_are_equal(tq: Any, p: str) -> Any:
    return _back(tq, p, strided(torch.arange(3), torch.arange(3)))


@case
def rows_of_different_rank(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.arange(3), torch.arange(4).reshape(2, 2))


@case
def a_number_beside_a_row(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.tensor(1), torch.arange(2))


@case
def numbers_put_one_by_one(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.tensor(1), torch.tensor(2), torch.tensor(3))


@case
def equal_rows_put_one_by_one(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.arange(3), torch.arange(3) + 3)


@case
def ragged_rows_put_one_by_one(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.arange(3), torch.arange(1), torch.arange(0))


@case
def a_single_row(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(4).reshape(1, 4))


@case
def a_single_ragged_row_of_several(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=jagged([1], [2, 3])))
    return [tq.kv_batch_get("b", p), tq.kv_batch_get(["b", "b"], p)]


@case
def one_row_without_elements(tq: Any, p: str) -> Any:
    return _back(tq, p, jagged([1, 2], [], [3]))


@case
def all_rows_without_elements(tq: Any, p: str) -> Any:
    return _back(tq, p, jagged([], [], dtype=torch.float32))


@case
def dense_rows_without_elements(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.zeros(2, 0))


@case
def tables_without_rows(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.zeros(2, 0, 3))


@case
def dense_and_ragged_puts_of_a_field(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=torch.arange(4).reshape(2, 2)))
    tq.kv_batch_put(["c", "d"], p, fields=batch(x=jagged([7], [8, 8, 8])))
    return [tq.kv_batch_get(["d", "a", "c", "b"], p), tq.kv_batch_get(["a", "b"], p)]


@case
def another_length_overwrites(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=jagged([1, 2], [3])))
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=jagged([4], [5, 6, 7])))
    return tq.kv_batch_get(["a", "b"], p)


@case
def another_dtype_overwrites(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=torch.tensor([0.5, 1.5])))
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    return tq.kv_batch_get(["a", "b"], p)


@case
def another_rank_overwrites(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=torch.ones(2, 3)))
    return tq.kv_batch_get(["a", "b"], p)


@case
def objects_overwrite_a_tensor(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=ints(1, 2)))
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=objects("one", "two")))
    return tq.kv_batch_get(["a", "b"], p)


@case
def two_dtypes_read_together(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.arange(2), torch.tensor([0.5]))


@case
def two_dtypes_of_equal_rows_read_together(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, torch.tensor(1, dtype=torch.int32), torch.tensor(2.5))


@case
def a_tensor_beside_an_object(tq: Any, p: str) -> Any:
    def put_and_get() -> Any:
        tq.kv_batch_put(["a"], p, fields=batch(x=ints(1)))
        tq.kv_batch_put(["b"], p, fields=batch(x=objects("text")))
        return tq.kv_batch_get(["a", "b"], p)

    return raised(put_and_get)


@case
def floats_at_the_edges(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45]]))


@case
def whole_numbers_at_the_edges(tq: Any, p: str) -> Any:
    return _back(tq, p, ints(2**63 - 1, -(2**63), 0))


@case
def a_view_that_is_not_contiguous(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(12).reshape(3, 4).t())


@case
def every_second_row(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(12).reshape(6, 2)[::2])


@case
def one_row_repeated(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(3).expand(4, 3))


@case
def a_tensor_that_needs_a_gradient(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.ones(2, 2, requires_grad=True))


@case
def texts(tq: Any, p: str) -> Any:
    return _back(tq, p, objects("one", "", "größe 长度"))


@case
def a_list_of_texts(tq: Any, p: str) -> Any:
    return _back(tq, p, ["one", "two"])


@case
def dicts(tq: Any, p: str) -> Any:
    return _back(tq, p, objects({"a": 1, "b": [1, 2]}, {}))


@case
def nones(tq: Any, p: str) -> Any:
    return _back(tq, p, objects(None, None))


@case
def lists(tq: Any, p: str) -> Any:
    return _back(tq, p, objects([1, 2], []))


@case
def tuples(tq: Any, p: str) -> Any:
    return _back(tq, p, objects((1, 2), ("a",)))


@case
def objects_of_several_kinds(tq: Any, p: str) -> Any:
    return _back(tq, p, objects("text", 1, 2.5, None, True, [1], {"k": None}))


@case
def plain_ints(tq: Any, p: str) -> Any:
    return _back(tq, p, [1, 2, 3])


@case
def plain_floats(tq: Any, p: str) -> Any:
    return _back(tq, p, [0.5, 1.5])


@case
def ints_one_by_one(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, 1, 2)


@case
def objects_one_by_one(tq: Any, p: str) -> Any:
    return _one_by_one(tq, p, "text", {"k": 1}, None)


@case
def a_list_in_a_dict(tq: Any, p: str) -> Any:
    return raised(lambda: _one_by_one(tq, p, [1, 2], ["a"]))


@case
def raw_bytes(tq: Any, p: str) -> Any:
    return _back(tq, p, objects(b"\x00\xff", b""))


@case
def arrays_of_objects(tq: Any, p: str) -> Any:
    column = np.empty(2, dtype=object)
    column[:] = ["one", {"two": 2}]
    return _back(tq, p, column)


@case
def arrays_of_numbers(tq: Any, p: str) -> Any:
    return _back(tq, p, np.arange(4, dtype=np.int32).reshape(2, 2))


@case
def arrays_as_objects(tq: Any, p: str) -> Any:
    return _back(tq, p, objects({"pixels": np.arange(3)}, {"pixels": np.arange(2)}))


@case
def tensors_within_objects(tq: Any, p: str) -> Any:
    return _back(tq, p, objects({"image": torch.arange(3)}, {}))


@case
def a_stack_of_tensors(tq: Any, p: str) -> Any:
    return _back(tq, p, NonTensorStack(torch.arange(2), torch.arange(3)))


@case
def one_object_for_all_rows(tq: Any, p: str) -> Any:
    rows = TensorDict({"x": ints(1, 2)}, batch_size=[2])
    rows.set("whole", NonTensorData("all", batch_size=[2]))
    return raised(
        lambda: [tq.kv_batch_put(["a", "b"], p, fields=rows), tq.kv_batch_get(["a", "b"], p)]
    )


@case
def a_batch_within_a_batch(tq: Any, p: str) -> Any:
    return _back(tq, p, TensorDict({"inner": ints(1, 2)}, batch_size=[2]))


@case
def what_came_back_is_the_callers(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(n=ints(1, 2), x=jagged([1], [2, 3])))
    got = tq.kv_batch_get(["a", "b"], p)
    got["n"] += 10
    got["x"].values().mul_(10)
    return [got, tq.kv_batch_get(["a", "b"], p)]


@case
def what_was_put_may_change(tq: Any, p: str) -> Any:
    column = torch.arange(4).reshape(2, 2)
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=column))
    column += 100
    return tq.kv_batch_get(["a", "b"], p)


@case
def what_callers_do_with_jagged(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, fields=batch(x=jagged([1, 2, 3], [4], dtype=torch.float32)))
    got = tq.kv_batch_get(["a", "b"], p)["x"]
    return {
        "lengths": got.offsets().diff(), "values": got.values(),
        "padded": got.to_padded_tensor(padding=-1.0), "sums": got.sum(dim=1),
        "rows": list(got.unbind()), "dims": got.dim(), "count": got.size(0),
    }  # fmt: skip


@case
def what_callers_do_with_a_batch(tq: Any, p: str) -> Any:
    rows = batch(x=jagged([1, 2, 3], [4]), n=ints(1, 2), text=objects("one", "two"))
    tq.kv_batch_put(["a", "b"], p, fields=rows)
    got = tq.kv_batch_get(["a", "b"], p)
    return {
        "padded": got.select("x", "n").to_padded_tensor(padding=0), "second": got["text"][1],
        "list": got["text"].tolist() if hasattr(got["text"], "tolist") else list(got["text"]),
        "keys": sorted(got.keys()), "popped": got.pop("n"), "left": sorted(got.keys()),
    }  # fmt: skip


@case
def positions_of_several_axes(tq: Any, p: str) -> Any:
    rows = [torch.arange(9).reshape(3, 3), torch.arange(6).reshape(3, 2)]
    return _one_by_one(tq, p, *rows)


@case
def a_lazy_stack(tq: Any, p: str) -> Any:
    rows = [TensorDict({"n": torch.tensor(i), "v": torch.arange(2)}) for i in range(2)]
    stacked = LazyStackedTensorDict(*rows)
    return raised(
        lambda: [tq.kv_batch_put(["a", "b"], p, fields=stacked), tq.kv_batch_get(["a", "b"], p)]
    )


@case
def a_lazy_stack_of_ragged_rows(tq: Any, p: str) -> Any:
    rows = [TensorDict({"n": torch.tensor(i), "v": torch.arange(i + 1)}) for i in range(2)]
    stacked = LazyStackedTensorDict(*rows)
    return raised(
        lambda: [tq.kv_batch_put(["a", "b"], p, fields=stacked), tq.kv_batch_get(["a", "b"], p)]
    )


@case
def a_batch_of_two_batch_axes(tq: Any, p: str) -> Any:
    rows = TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    return raised(
        lambda: [tq.kv_batch_put(["a", "b"], p, fields=rows), tq.kv_batch_get(["a", "b"], p)]
    )


@case
def images_of_bytes(tq: Any, p: str) -> Any:
    return _back(tq, p, torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4))


@case
def arrays_put_one_by_one(tq: Any, p: str) -> Any:
    return raised(lambda: _one_by_one(tq, p, np.arange(3), np.arange(3)))


@case
def a_number_of_numpy_in_a_dict(tq: Any, p: str) -> Any:
    return raised(lambda: _one_by_one(tq, p, np.float32(1.5), np.float32(2.5)))
