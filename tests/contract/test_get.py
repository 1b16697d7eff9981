"""Gets: order, subsets, repetition, what is missing, and the four layouts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dataplane.errors import FieldNotFound, InvalidRequest, KeyNotFound
from tests.contract.planes import Plane

KEYS = ["a", "b", "c", "d"]
ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64),
        torch.tensor([5, 6])]  # fmt: skip


@pytest.fixture
def filled(client: Any, partition: str) -> str:
    """A partition with four keys: ragged x, 2-D m (ragged in the second dimension), scalar r."""
    client.kv_batch_put(
        KEYS,
        partition,
        {
            "x": ROWS,
            "m": [torch.stack([row, row * 10]) for row in ROWS],
            "r": torch.tensor([0.0, 0.1, 0.2, 0.3]),
            "s": ["one", "two", "three", "four"],
        },
        [{"n": i} for i in range(4)],
    )
    return partition


# -- order and subsets -----------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_keys(client: Any, filled: str) -> None:
    order = ["c", "a", "d", "b", "a", "a"]
    rows = client.kv_batch_get(order, filled)
    assert rows.keys == order
    assert len(rows) == 6
    assert [row.tolist() for row in rows["x"].unbind()] == [[], [1, 2, 3], [5, 6], [4],
                                                           [1, 2, 3], [1, 2, 3]]  # fmt: skip
    assert rows["r"].tolist() == pytest.approx([0.2, 0.0, 0.3, 0.1, 0.0, 0.0])
    assert rows["s"] == ["three", "one", "four", "two", "one", "one"]
    assert rows.lengths["x"].tolist() == [0, 3, 2, 1, 3, 3]
    assert rows.lengths["x"].dtype == torch.int32


def test_a_subset_of_fields_is_what_comes(client: Any, filled: str) -> None:
    rows = client.kv_batch_get(KEYS, filled, ["r", "x"])
    assert sorted(rows.fields) == ["r", "x"]
    assert list(rows.lengths) == ["x"]
    none = client.kv_batch_get(KEYS, filled, [])
    assert (none.keys, none.fields) == (KEYS, {})


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("x", r"\['x'\]"),
        (["x", "x"], "twice"),
        ([5], "field names"),
        (5, "int"),
        (["\ud800"], "Unicode"),
    ],
)
def test_wrong_selections_are_refused(client: Any, filled: str, select: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.kv_batch_get(KEYS, filled, select)


def test_rows_of_a_thousand_blocks_come_in_one_call(client: Any, partition: str) -> None:
    count = 200
    for i in range(count):
        client.kv_put(f"k{i}", partition, {"x": torch.full((i % 5,), i), "y": torch.tensor(i)})
    order = list(range(count)) * 2
    random.Random(0).shuffle(order)
    rows = client.kv_batch_get([f"k{i}" for i in order], partition)
    assert rows["y"].tolist() == order
    assert rows["x"].values().tolist() == [i for i in order for _ in range(i % 5)]


def test_rows_put_in_many_shapes_of_batch_come_back_together(client: Any, partition: str) -> None:
    """Templates, row counts and layers differ between the blocks of one answer."""
    client.kv_batch_put(["a", "b"], partition, {"x": torch.ones(2, 3), "y": torch.ones(2, 3)})
    client.kv_put("c", partition, {"y": torch.full((1,), 2.0)})
    client.kv_put("c", partition, {"x": torch.full((2,), 3.0)})
    client.kv_batch_put(
        ["d", "e", "f"], partition,
        {"z": ["no"] * 3, "y": [torch.full((n,), 4.0) for n in (2, 0, 1)], "x": torch.zeros(3, 1)},
    )  # fmt: skip
    client.kv_batch_put(["b", "e"], partition, {"x": [torch.full((4,), 5.0), torch.ones(2)]})
    order = ["e", "c", "a", "f", "b", "d", "c"]
    rows = client.kv_batch_get(order, partition, ["y", "x"], layout="list")
    assert [row.tolist() for row in rows["x"]] == [
        [1.0, 1.0], [3.0, 3.0], [1.0] * 3, [0.0], [5.0] * 4, [0.0], [3.0, 3.0],
    ]  # fmt: skip
    assert [row.tolist() for row in rows["y"]] == [
        [], [2.0], [1.0] * 3, [4.0], [1.0] * 3, [4.0, 4.0], [2.0],
    ]  # fmt: skip


# -- what is missing -------------------------------------------------------------------------


def test_all_that_is_missing_is_named_at_once(client: Any, filled: str) -> None:
    with pytest.raises(KeyNotFound) as keys:
        client.kv_batch_get(["y", "a", "x", "y"], filled)
    assert keys.value.keys == ["y", "x"]
    assert keys.value.partition_id == filled
    client.kv_put("e", filled, {"x": torch.tensor([1])})
    with pytest.raises(FieldNotFound) as fields:
        client.kv_batch_get(["e", "a"], filled, ["m", "x", "r", "q"])
    assert fields.value.keys == ["e", "a"]
    assert fields.value.fields == ["m", "r", "q"]


@pytest.mark.inside("there no names stand for the fields that all of the rows have")
def test_no_selection_is_every_field_that_any_of_the_keys_has(client: Any, filled: str) -> None:
    client.kv_put("e", filled, {"x": torch.tensor([1])})
    client.kv_put("tags-only", filled, tags={})
    with pytest.raises(FieldNotFound) as mixed:
        client.kv_batch_get(["e", "a"], filled)
    assert (mixed.value.keys, mixed.value.fields) == (["e"], ["m", "r", "s"])
    order = ["d", "no", "e", "a", "tags-only", "d"]
    assert client.kv_batch_get(order, filled, on_missing="drop").keys == ["d", "a", "d"]


@pytest.mark.inside("a status names as many keys as its trailers have room for")
def test_an_error_with_many_keys_is_one_readable_line(client: Any, filled: str) -> None:
    keys = [f"absent-{i}-{'k' * 300}" for i in range(500)]
    with pytest.raises(KeyNotFound) as missing:
        client.kv_batch_get(keys, filled)
    assert missing.value.keys == keys
    assert len(str(missing.value)) < 1000
    assert "495 more" in str(missing.value)


def test_drop_leaves_out_what_is_missing_and_keeps_the_order(client: Any, filled: str) -> None:
    client.kv_put("tags-only", filled, tags={})
    client.kv_put("x-only", filled, {"x": torch.tensor([9])})
    order = ["d", "no", "x-only", "a", "tags-only", "d"]
    rows = client.kv_batch_get(order, filled, ["x"], on_missing="drop")
    assert rows.keys == ["d", "x-only", "a", "d"]
    assert [row.tolist() for row in rows["x"].unbind()] == [[5, 6], [9], [1, 2, 3], [5, 6]]
    none = client.kv_batch_get(["no", "neither"], filled, ["x"], on_missing="drop")
    assert (none.keys, none["x"].offsets().tolist()) == ([], [0])
    with pytest.raises(InvalidRequest, match="on_missing"):
        client.kv_batch_get(order, filled, on_missing="ignore")


def test_keys_without_any_field_come_back_without_fields(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    rows = client.kv_batch_get(["b", "a"], partition)
    assert (rows.keys, rows.fields) == (["b", "a"], {})


# -- layouts ---------------------------------------------------------------------------------


def test_nested_rows_are_jagged_tensors(client: Any, filled: str) -> None:
    rows = client.kv_batch_get(KEYS, filled)
    assert rows["x"].layout is torch.jagged
    assert [row.tolist() for row in rows["x"].unbind()] == [row.tolist() for row in ROWS]
    assert [tuple(row.shape) for row in rows["m"].unbind()] == [(2, 3), (2, 1), (2, 0), (2, 2)]
    assert torch.equal(rows["m"].unbind()[3], torch.tensor([[5, 6], [50, 60]]))


def test_fields_of_equal_lengths_can_be_combined(client: Any, partition: str) -> None:
    rows = [torch.ones(n) for n in (3, 1)]
    client.kv_batch_put(["a", "b"], partition, {"x": rows, "y": rows})
    got = client.kv_batch_get(["a", "b"], partition)
    assert (got["x"] + got["y"]).values().tolist() == [2.0] * 4


@pytest.mark.parametrize(("pad", "x", "label"), [(None, 0, -100), (7, 7, 7), ({"x": -1}, -1, -100)])
def test_padded_rows_are_dense_and_filled(
    client: Any, partition: str, pad: Any, x: int, label: int
) -> None:
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    client.kv_batch_put(["a", "b"], partition, {"x": rows, "labels": rows, "s": ["p", "q"]})
    got = client.kv_batch_get(["a", "b"], partition, layout="padded", pad=pad)
    assert got["x"].tolist() == [[1, 2, 3], [4, x, x]]
    assert got["labels"].tolist() == [[1, 2, 3], [4, label, label]]
    assert got["s"] == ["p", "q"]
    assert got.lengths["x"].tolist() == [3, 1]


def test_padded_2d_rows_are_filled_in_their_ragged_dimension(client: Any, filled: str) -> None:
    padded = client.kv_batch_get(KEYS, filled, ["m"], layout="padded", pad=-1)["m"]
    assert tuple(padded.shape) == (4, 2, 3)
    assert padded[1].tolist() == [[4, -1, -1], [40, -1, -1]]
    assert padded[2].tolist() == [[-1] * 3] * 2


def test_listed_rows_are_one_tensor_each(client: Any, filled: str) -> None:
    rows = client.kv_batch_get(["b", "c"], filled, layout="list")
    assert [row.tolist() for row in rows["x"]] == [[4], []]
    assert [tuple(row.shape) for row in rows["m"]] == [(2, 1), (2, 0)]
    assert [row.shape for row in rows["r"]] == [torch.Size([])] * 2


def test_packed_rows_are_joined_with_their_starts(client: Any, filled: str) -> None:
    rows = client.kv_batch_get(["d", "a", "c", "b"], filled, layout="packed")
    assert rows["x"].tolist() == [5, 6, 1, 2, 3, 4]
    assert rows.cu_seqlens["x"].tolist() == [0, 2, 5, 5, 6]
    assert rows.cu_seqlens["x"].dtype == torch.int32
    assert rows["m"].tolist() == [[5, 6, 1, 2, 3, 4], [50, 60, 10, 20, 30, 40]]
    assert rows["r"].tolist() == pytest.approx([0.3, 0.0, 0.2, 0.1])
    assert sorted(rows.cu_seqlens) == ["m", "x"]
    with pytest.raises(InvalidRequest):
        rows.to_tensordict()


def test_packed_rows_are_filled_up_to_a_total(client: Any, filled: str) -> None:
    rows = client.kv_batch_get(KEYS, filled, ["x"], layout="packed", total=8, pad=-1)
    assert rows["x"].tolist() == [1, 2, 3, 4, 5, 6, -1, -1]
    assert rows.cu_seqlens["x"].tolist() == [0, 3, 4, 4, 6]
    with pytest.raises(InvalidRequest, match="'x'"):
        client.kv_batch_get(KEYS, filled, ["x"], layout="packed", total=5)


def test_packed_rows_are_written_into_the_callers_buffer(client: Any, filled: str) -> None:
    x = torch.full((9,), 77)
    r = torch.empty(4)
    rows = client.kv_batch_get(
        KEYS, filled, ["x", "r"], layout="packed", out={"x": x, "r": r}, pad=0
    )
    assert rows["x"] is x
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert r.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    for wrong in (torch.empty(5).long(), torch.empty(9), torch.empty(3, 3).long()):
        with pytest.raises(InvalidRequest, match="'x'"):
            client.kv_batch_get(KEYS, filled, ["x"], layout="packed", out={"x": wrong})
    with pytest.raises(InvalidRequest, match="'q'"):
        client.kv_batch_get(KEYS, filled, ["x"], layout="packed", out={"q": x})


@pytest.mark.parametrize("layout", ["packed", "nested", "padded", "list"])
def test_rows_are_trimmed_while_they_are_read(client: Any, partition: str, layout: str) -> None:
    client.kv_batch_put(
        ["a", "b"], partition,
        {"x": [torch.arange(5), torch.arange(3)], "y": [torch.arange(5), torch.arange(3)]},
    )  # fmt: skip
    rows = client.kv_batch_get(["b", "a"], partition, layout=layout, trim={"x": (1, 1)})
    assert rows.lengths["x"].tolist() == [1, 3]
    assert rows.lengths["y"].tolist() == [3, 5]
    if layout == "packed":
        assert rows["x"].tolist() == [1, 1, 2, 3]
        assert rows.cu_seqlens["x"].tolist() == [0, 1, 4]
    elif layout == "padded":
        assert rows["x"].tolist() == [[1, 0, 0], [1, 2, 3]]
    else:
        got = rows["x"].unbind() if layout == "nested" else rows["x"]
        assert [row.tolist() for row in got] == [[1], [1, 2, 3]]
    with pytest.raises(InvalidRequest, match="'b'"):
        client.kv_batch_get(["a", "b"], partition, layout=layout, trim={"x": (2, 2)})


def test_what_cannot_be_trimmed_says_so(client: Any, filled: str) -> None:
    for name in ("m", "r", "s"):
        with pytest.raises(InvalidRequest, match=name):
            client.kv_batch_get(KEYS, filled, layout="packed", trim={name: (1, 0)})


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dense"},
        {"layout": "padded", "total": 5},
        {"layout": "nested", "out": {}, "total": 5},
        {"layout": "packed", "total": -1},
        {"layout": "packed", "total": 1.5},
        {"layout": "packed", "trim": {"x": 1}},
        {"layout": "packed", "trim": {"x": (-1, 0)}},
        {"layout": "packed", "trim": {"q": (1, 0)}},
        {"layout": "padded", "pad": 0.5},
        {"layout": "padded", "pad": "zero"},
        {"layout": "packed", "trim": 5},
        {"layout": "packed", "out": 5},
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(
    client: Any, filled: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_batch_get(KEYS, filled, ["x"], **options)


def test_rows_become_a_tensordict(client: Any, filled: str) -> None:
    for layout in ("nested", "padded", "list"):
        td = client.kv_batch_get(KEYS, filled, layout=layout).to_tensordict()
        assert td.batch_size == torch.Size([4])
        assert td["s"] == ["one", "two", "three", "four"]
    again = client.kv_batch_get(KEYS, filled).to_tensordict()
    client.kv_batch_put([f"{key}2" for key in KEYS], filled, again)
    copies = client.kv_batch_get([f"{key}2" for key in KEYS], filled, layout="packed")
    firsts = client.kv_batch_get(KEYS, filled, layout="packed")
    for name in ("x", "m", "r"):
        assert torch.equal(copies[name], firsts[name])


def test_a_field_ragged_in_its_first_dimension_is_so_for_every_reader(
    client: Any, partition: str
) -> None:
    experts = [torch.arange(n * 6).view(n, 6).to(torch.uint16) for n in (3, 3)]
    client.kv_batch_put(["a", "b"], partition, {"routed_experts": experts})
    rows = client.kv_batch_get(["b", "a"], partition, layout="packed")
    assert tuple(rows["routed_experts"].shape) == (6, 6)
    assert rows.cu_seqlens["routed_experts"].tolist() == [0, 3, 6]


def test_rows_that_no_jagged_tensor_can_hold_come_as_a_list(client: Any, partition: str) -> None:
    rows = [torch.zeros(2, 4), torch.ones(3, 5)]
    client.kv_batch_put(["a", "b"], partition, {"x": rows})
    listed = client.kv_batch_get(["b", "a"], partition, layout="list")["x"]
    assert [tuple(row.shape) for row in listed] == [(3, 5), (2, 4)]
    for layout in ("nested", "padded", "packed"):
        with pytest.raises(InvalidRequest, match="layout='list'"):
            client.kv_batch_get(["a", "b"], partition, layout=layout)


def test_the_revision_says_of_which_moment_the_rows_are(
    plane: Plane, client: Any, partition: str
) -> None:
    first = client.kv_put("a", partition, {"x": torch.tensor([1])})
    assert client.kv_batch_get(["a"], partition).revision == first.revision
    second = plane.witness.kv_put("a", partition, {"x": torch.tensor([2])})
    assert client.kv_batch_get(["a"], partition).revision == second.revision > first.revision


def test_a_large_result_uses_memory_again_and_never_twice_at_once(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.ones(2, 200_000)})
    kept = [client.kv_batch_get([key], partition, layout="packed")["x"] for key in "abab"]
    for i, tensor in enumerate(kept):
        tensor.fill_(i)
    assert [tensor.unique().tolist() for tensor in kept] == [[0.0], [1.0], [2.0], [3.0]]
    del kept
    again = client.kv_batch_get(["a", "b"], partition, layout="packed")["x"]
    assert torch.equal(again, torch.ones(400_000))
