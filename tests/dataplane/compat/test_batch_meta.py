"""Batches by index: columns that stay in step, fields, and the keys that rows carry along."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from transfer_queue import BatchMeta
from transfer_queue.metadata import extract_field_schema


def values(size: int) -> TensorDict:
    """One field of each kind."""
    rows = range(1, size + 1)
    return TensorDict(
        {
            "scalar": torch.arange(size),
            "dense": torch.zeros(size, 2, 3),
            "jagged": torch.nested.as_nested_tensor(
                [torch.zeros(n) for n in rows], layout=torch.jagged
            ),
            "strided": torch.nested.as_nested_tensor([torch.zeros(n, n + 1) for n in rows]),
            "text": NonTensorStack(*[f"row {n}" for n in rows]),
        },
        batch_size=size,
    )


def batch(size: int = 3, start: int = 0, **others: Any) -> BatchMeta:
    rows = range(start, start + size)
    settings: dict[str, Any] = {
        "partition_ids": ["ab"[row % 2] for row in rows],
        "custom_meta": [{"tag": row, "list": [row]} for row in rows],
        "_custom_backend_meta": [{"dense": {"at": row}, "_any": row, "x": row} for row in rows],
        "_row_keys": [f"key {row}" for row in rows],
        **others,
    }
    made = BatchMeta(list(rows), **settings)
    # A status that was asked for stays.
    return made.add_fields(values(size), "production_status" not in others) if size else made


def told(meta: BatchMeta) -> list[Any]:
    """All that a batch says, in a form that can be compared."""
    return [
        meta.global_indexes,
        meta.partition_ids,
        meta.field_schema,
        meta.production_status.tolist(),
        meta.production_status.dtype,
        meta.extra_info,
        meta.custom_meta,
        meta._custom_backend_meta,
        meta._row_keys,
    ]


def test_a_batch_without_arguments_has_no_rows() -> None:
    for empty in (BatchMeta(), BatchMeta.empty(), BatchMeta([], [])):
        assert (empty.size, len(empty), empty.field_names, empty.is_ready) == (0, 0, [], False)
        assert told(empty)[-1] == []
    assert BatchMeta.empty({"a": 1}).extra_info == {"a": 1}


@pytest.mark.parametrize(
    "column",
    [
        {"partition_ids": ["p"]},
        {"production_status": np.ones(1)},
        {"production_status": 1},
        {"custom_meta": [{}]},
        {"_custom_backend_meta": [{}]},
        {"_row_keys": ["k"]},
        {"field_schema": {"f": {"per_sample_shapes": [(1,)]}}},
    ],
    ids=str,
)
def test_a_column_of_another_length_is_refused(column: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Length mismatch: .* 1 entries for 2 rows"):
        BatchMeta(**{"global_indexes": [1, 2], "partition_ids": ["p", "p"], **column})


def test_what_was_passed_in_may_change_afterwards() -> None:
    indexes, ids, info, tags = [1], ["p"], {"a": 1}, [{"b": 1}]
    schema, status = {"f": {"dtype": torch.int64}}, np.ones(1, dtype=np.int8)
    made = BatchMeta(indexes, ids, schema, status, info, tags)
    indexes.append(2)
    ids.append("q")
    info["a"] = tags[0]["b"] = 2
    schema["f"]["dtype"] = torch.int8
    status[0] = 0
    assert (made.global_indexes, made.partition_ids) == ([1], ["p"])
    assert (made.extra_info, made.custom_meta) == ({"a": 1}, [{"b": 1}])
    assert made.get_dtypes("f") == [torch.int64]
    assert made.is_ready


def test_a_schema_says_dtype_shape_and_kind_of_each_field() -> None:
    kinds = extract_field_schema(values(2))
    dense = {"is_nested": False, "is_non_tensor": False}
    nested = {"is_nested": True, "is_non_tensor": False}
    assert kinds == {
        "scalar": {"dtype": torch.int64, "shape": (1,), **dense},
        "dense": {"dtype": torch.float32, "shape": (2, 3), **dense},
        "jagged": {
            "dtype": torch.float32, "shape": (1,), **nested, "per_sample_shapes": [(1,), (2,)],
        },
        "strided": {
            "dtype": torch.float32, "shape": (1, 2), **nested,
            "per_sample_shapes": [(1, 2), (2, 3)],
        },
        "text": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True},
    }  # fmt: skip
    assert extract_field_schema(TensorDict({}, 0)) == {}
    with pytest.raises(ValueError, match="no batch dimension"):
        extract_field_schema(TensorDict({}, []))


def test_dtypes_and_shapes_come_row_by_row() -> None:
    meta = batch(2)
    assert meta.get_shapes("jagged") == [(1,), (2,)]
    assert meta.get_shapes("dense") == [(2, 3), (2, 3)]
    assert meta.get_dtypes("scalar") == [torch.int64, torch.int64]
    assert meta.get_dtypes("text") == [None, None]
    for ask in (meta.get_dtypes, meta.get_shapes):
        with pytest.raises(KeyError, match="nope"):
            ask("nope")


def test_added_fields_replace_those_of_the_same_name_and_make_rows_ready() -> None:
    meta = BatchMeta([0, 1], ["p", "p"], production_status=[1, 0]).add_fields(values(2))
    assert meta.is_ready
    more = TensorDict({"dense": torch.zeros(2, 7, dtype=torch.int8)}, batch_size=2)
    waiting = BatchMeta([1, 2], ["p", "p"], production_status=[1, 0])
    assert waiting.add_fields(more, set_all_ready=False) is waiting
    assert not waiting.is_ready
    meta.add_fields(more)
    assert meta.field_names == ["dense", "jagged", "scalar", "strided", "text"]
    assert meta.get_dtypes("dense") == [torch.int8, torch.int8]
    before = told(copy.deepcopy(meta))
    assert meta.add_fields(TensorDict({}, 0)) is meta
    with pytest.raises(ValueError, match="1 rows of values for 2 rows"):
        meta.add_fields(values(1))
    assert told(meta) == before


def test_entries_about_the_batch() -> None:
    meta = BatchMeta.empty()
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2})
    meta.get_all_extra_info()["a"].append(2)
    assert meta.get_extra_info("a") == [1]
    assert meta.get_extra_info("c", 3) == 3
    assert meta.has_extra_info("b")
    assert (meta.remove_extra_info("b"), meta.remove_extra_info("b")) == (2, None)
    meta.clear_extra_info()
    assert meta.extra_info == {}


def test_tags_of_rows_are_merged_and_counted() -> None:
    meta = BatchMeta([1, 2], ["p", "p"], custom_meta=[{"a": 1}, {}])
    meta.update_custom_meta([{"b": [2]}, {"a": 3}])
    meta.update_custom_meta(None)
    meta.get_all_custom_meta()[0]["b"].append(3)
    assert meta.custom_meta == [{"a": 1, "b": [2]}, {"a": 3}]
    with pytest.raises(ValueError, match="custom_meta has 1 entries for 2 rows"):
        meta.update_custom_meta([{}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]


def test_single_rows_can_be_looked_at_and_not_changed() -> None:
    meta = batch(3, start=5)
    last = meta.samples[-1]
    assert (last.global_index, last.partition_id, last.production_status) == (7, "b", 1)
    assert last.custom_meta["tag"] == 7
    assert last.fields["strided"]["shape"] == (3, 4)
    assert "per_sample_shapes" not in last.fields["jagged"]
    assert [row.global_index for row in meta.samples] == [5, 6, 7]
    assert len(meta.samples) == 3
    for frozen in (last.custom_meta, last.fields, last.fields["dense"]):
        with pytest.raises(TypeError):
            frozen["tag"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        last.partition_id = "x"  # type: ignore[misc]
    with pytest.raises(IndexError):
        meta.samples[3]


def test_a_selection_keeps_every_column_in_step() -> None:
    chosen = batch(4).select_samples([3, 1, 3])
    assert chosen.global_indexes == [3, 1, 3]
    assert chosen.partition_ids == ["b", "b", "b"]
    assert [tag["tag"] for tag in chosen.custom_meta] == [3, 1, 3]
    assert [row["_any"] for row in chosen._custom_backend_meta] == [3, 1, 3]
    assert chosen._row_keys == ["key 3", "key 1", "key 3"]
    assert chosen.get_shapes("jagged") == [(4,), (2,), (4,)]
    for beyond in ([4], [-1]):
        with pytest.raises(ValueError, match=r"range \[0, 4\)"):
            batch(4).select_samples(beyond)


@pytest.mark.parametrize(
    ("item", "rows"),
    [
        (0, [0]),
        (-1, [3]),
        (np.int64(2), [2]),
        (slice(1, None), [1, 2, 3]),
        (slice(None, None, -2), [3, 1]),
        (slice(9, 12), []),
    ],
    ids=str,
)
def test_an_index_or_a_slice_is_a_batch(item: Any, rows: list[int]) -> None:
    assert told(batch(4)[item]) == told(batch(4).select_samples(rows))


@pytest.mark.parametrize(
    ("item", "error"), [(4, IndexError), (-5, IndexError), ("0", TypeError), (1.0, TypeError)]
)
def test_what_is_no_index_is_refused(item: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        batch(4)[item]


def test_a_selection_of_fields_passes_over_unknown_names() -> None:
    chosen = batch(2).select_fields(["text", "dense", "nope"])
    assert list(chosen.field_schema) == ["text", "dense"]
    assert chosen._custom_backend_meta[1] == {"dense": {"at": 1}, "_any": 1}
    assert chosen._row_keys == ["key 0", "key 1"]
    assert chosen.is_ready


@pytest.mark.parametrize(
    "derived",
    [
        lambda m: m.copy(),
        lambda m: m.select_fields([*m.field_names, "x"]),
        lambda m: m.union(BatchMeta()),
        lambda m: BatchMeta().union(m),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),  # noqa: S301
    ],
    ids=["copy", "select_fields", "union", "union with", "deepcopy", "pickle"],
)
def test_a_copy_says_the_same_and_shares_nothing(derived: Any) -> None:
    source = batch(extra_info={"a": [1]})
    source.field_schema["dense"]["of_ours"] = [1]
    made = derived(source)
    assert told(made) == told(source)
    made.global_indexes.append(9)
    made.partition_ids.append("z")
    made.production_status[0] = 0
    made.extra_info["a"].append(2)
    made.custom_meta[0]["list"].append(2)
    made._custom_backend_meta[0]["dense"]["at"] = 9
    made.field_schema["jagged"]["per_sample_shapes"][0] = ()
    made.field_schema["dense"]["of_ours"].append(2)
    assert source.field_schema["dense"].pop("of_ours") == [1]
    assert told(source) == told(batch(extra_info={"a": [1]}))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_batch_keeps_everything(protocol: int) -> None:
    meta = batch(extra_info={"a": 1})
    assert told(pickle.loads(pickle.dumps(meta, protocol))) == told(meta)  # noqa: S301


def test_the_status_of_a_batch_in_memory_of_another_can_be_written() -> None:
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(batch(), 5, buffer_callback=buffers.append)
    frozen = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    assert frozen, "the status array no longer travels beside the pickle, as Ray makes it"
    meta = pickle.Unpickler(io.BytesIO(sent), buffers=frozen).load()  # noqa: S301
    meta.production_status[0] = 0
    assert not meta.is_ready
    assert meta.add_fields(values(3)).is_ready


@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(1, 5))
def test_chunks_joined_are_the_batch(size: int, chunks: int) -> None:
    whole = batch(size, extra_info={"a": [1]}, production_status=[i % 2 for i in range(size)])
    parts = whole.chunk(chunks)
    assert len(parts) == chunks
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    joined = BatchMeta.concat(parts)
    if not size:
        assert told(joined) == told(BatchMeta())
        return
    expected = told(whole)
    for field in expected[2].values():  # a joined ragged field has no shape of its own
        field["shape"] = None if field["is_nested"] else field["shape"]
    assert told(joined) == expected


def test_batches_with_nan_in_extra_info_can_be_joined_again() -> None:
    whole = batch(2, extra_info={"loss": torch.tensor([1.0, float("nan")])})
    assert BatchMeta.concat([part.copy() for part in whole.chunk(2)]).size == 2


def test_parts_by_partition_come_in_the_order_of_their_first_rows() -> None:
    parts = batch(5, partition_ids=["q", "p", "q", "r", "p"]).chunk_by_partition()
    assert [part.partition_ids for part in parts] == [["q", "q"], ["p", "p"], ["r"]]
    assert [part._row_keys for part in parts] == [["key 0", "key 2"], ["key 1", "key 4"], ["key 3"]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batch(2, 3).select_fields(["dense"]), r"field_names mismatch: \['jagged'"),
        (
            BatchMeta([3], ["p"], {name: {"dtype": None} for name in values(1).keys()}),  # noqa: SIM118
            "field 'scalar' dtype mismatch: torch.int64 in batch 0, None in batch 1",
        ),
        (batch(2, 3, extra_info={"a": 2}), "'a' has conflicting values"),
        (batch(2, 2, _row_keys=["odd", "key 3"]), "'key 2' and 'odd': .* two instances"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(other: BatchMeta, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchMeta.concat([batch(3, extra_info={"a": 1}), other])


def test_fields_are_not_compared_when_validation_is_off() -> None:
    joined = BatchMeta.concat([batch(1).select_fields(["dense"]), batch(1, 1)], validate=False)
    assert joined.field_names == ["dense"]
    assert joined.size == 2


def test_rows_of_different_widths_keep_their_own_shapes() -> None:
    def wide(width: int, row: int) -> BatchMeta:
        data = TensorDict({"x": torch.zeros(1, width)}, batch_size=1)
        return BatchMeta([row], ["p"]).add_fields(data)

    joined = BatchMeta.concat([wide(2, 0), wide(5, 1)])
    assert joined.get_shapes("x") == [(2,), (5,)]
    assert joined.samples[1].fields["x"]["shape"] == (5,)
    ragged = BatchMeta.concat([wide(2, 0), batch(2, 1).select_fields([])], validate=False)
    assert ragged.get_shapes("x") == [(2,), None, None]


def test_a_union_has_both_sides_fields_and_the_others_word() -> None:
    one = batch(2, production_status=[1, 0], extra_info={"a": 1, "b": 1}).select_fields(
        ["dense", "text"]
    )
    other = BatchMeta(
        [0, 1],
        ["a", "b"],
        {"dense": {"dtype": torch.int8, "shape": (9,)}, "new": {"dtype": torch.int64}},
        production_status=[1, 1],
        extra_info={"b": 2},
        custom_meta=[{"tag": "new"}, {}],
        _row_keys=["key 0", None],
    )
    united = one.union(other)
    assert united.field_names == ["dense", "new", "text"]
    assert united.get_shapes("dense") == [(9,), (9,)]
    assert united.production_status.tolist() == [1, 0]
    assert other.union(one).production_status.tolist() == [1, 0]
    assert united.extra_info == {"a": 1, "b": 2}
    assert united.custom_meta == [{"tag": "new", "list": [0]}, {"tag": 1, "list": [1]}]
    assert united._row_keys == ["key 0", "key 1"]
    for odd, message in [
        (batch(2, 1), "global_indexes do not match: at row 0, 0 and 1"),
        (batch(3), "global_indexes do not match: 2 rows and 3"),
        (batch(2, partition_ids=["a", "z"]), "partition_ids do not match: at row 1, 'b' and 'z'"),
    ]:
        with pytest.raises(ValueError, match=message):
            one.union(odd)


@settings(max_examples=20)
@given(st.permutations(range(5)))
def test_reorder_moves_every_column_in_place(order: list[int]) -> None:
    moved = batch(5, production_status=[1, 0, 0, 1, 0])
    assert moved.reorder(order) is None
    assert told(moved) == told(batch(5, production_status=[1, 0, 0, 1, 0]).select_samples(order))


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3], [0, 1, -1]], ids=str)
def test_a_refused_reorder_has_moved_nothing(order: list[int]) -> None:
    meta = batch(3)
    with pytest.raises(ValueError, match=r"Indices contain duplicates|match the batch|in range"):
        meta.reorder(order)
    assert told(meta) == told(batch(3))


def test_keys_stay_with_their_rows_when_a_caller_sets_the_indexes() -> None:
    meta = batch(3)
    meta.global_indexes = [2, 7, 0]
    assert meta._row_keys == ["key 2", None, "key 0"]
    meta._row_keys = ["c", "h", "a"]
    assert meta[1]._row_keys == ["h"]
    with pytest.raises(ValueError, match="two instances"):
        BatchMeta([1, 1], ["p", "p"], _row_keys=["a", "b"])
