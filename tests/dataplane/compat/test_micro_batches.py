"""A batch cut into micro-batches: rows, kinds of containers, and the meta beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn
from transfer_queue.metadata import BatchMeta

ROWS = 7


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def meta(rows: int = ROWS) -> BatchMeta:
    tags = [{"row": row} for row in range(rows)]
    return BatchMeta(list(range(rows)), ["p"] * rows, custom_meta=tags)


def cut(leaf: Any, size: int, rows: int = ROWS) -> list[tuple[TensorDict, BatchMeta]]:
    return chunk_batch_fn(TensorDict({"x": leaf}, batch_size=[rows]), meta(rows), size)


@given(rows=st.integers(1, 9), data=st.data())
def test_parts_have_all_rows_in_order_and_each_its_own_meta(rows: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, rows))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    ragged = [torch.full((length,), row) for row, length in enumerate(lengths)]
    batch = TensorDict(
        {"n": torch.arange(rows), "v": jagged(ragged), "o": NonTensorStack(*map(str, range(rows)))},
        batch_size=[rows],
    )
    parts = chunk_batch_fn(batch, meta(rows), micro_batch_size=size)
    sizes = [len(part) for part, _ in parts]
    assert sizes[:-1] == [size] * (len(parts) - 1)
    assert sum(sizes) == rows
    seen: list[int] = []
    for part, of in parts:
        numbers = part["n"].tolist()
        assert of.global_indexes == numbers
        assert [tags["row"] for tags in of.custom_meta] == numbers
        assert part["o"] == [str(number) for number in numbers]
        assert part["v"].layout is torch.jagged
        assert [row.tolist() for row in part["v"].unbind()] == [
            ragged[number].tolist() for number in numbers
        ]
        seen += numbers
    assert seen == list(range(rows))


def test_the_last_part_has_the_rest_and_meta_of_the_same_rows() -> None:
    parts = cut(torch.arange(ROWS), 3)
    assert [part["x"].tolist() for part, _ in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [of.global_indexes for _, of in parts] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_jagged_field_stays_ragged_where_it_was_also_with_rows_of_one_length(axis: int) -> None:
    lengths = [2, 2, 3]
    rows = [torch.full((n, 4) if axis == 0 else (4, n), n) for n in lengths]
    offsets = torch.tensor([0, 2, 4, 7])
    leaf = torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, dim=axis), offsets, jagged_dim=axis + 1
    )
    for part, _ in cut(leaf, 2, rows=3):
        x: Any = part["x"]
        assert x._ragged_idx == axis + 1
        assert x.offsets()[0] == 0
    firsts, last = (part["x"].unbind() for part, _ in cut(leaf, 2, rows=3))
    assert [row.tolist() for row in (*firsts, *last)] == [row.tolist() for row in rows]


def test_nested_rows_of_a_part_are_its_own() -> None:
    leaf = jagged([torch.zeros(row + 1) for row in range(3)])
    part, _ = cut(leaf, 2, rows=3)[0]
    part["x"].values().fill_(7)
    assert leaf.values().sum() == 0


def test_a_strided_field_is_cut_into_strided_ones() -> None:
    rows = [torch.full((row + 1, 2 * row + 1), row) for row in range(3)]
    leaf = torch.nested.as_nested_tensor(rows, layout=torch.strided)
    parts = cut(leaf, 2, rows=3)
    assert all(part["x"].layout is torch.strided for part, _ in parts)
    found = [row for part, _ in parts for row in part["x"].unbind()]
    assert [row.tolist() for row in found] == [row.tolist() for row in rows]


def test_a_jagged_view_with_holes_is_cut_by_its_rows() -> None:
    whole = torch.arange(12).reshape(3, 4)
    leaf = torch.nested.narrow(
        whole, 1, torch.tensor([0, 1, 2]), torch.tensor([1, 3, 2]), layout=torch.jagged
    )
    found = [row.tolist() for part, _ in cut(leaf, 2, rows=3) for row in part["x"].unbind()]
    assert found == [[0], [5, 6, 7], [10, 11]]


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, ROWS + 1])
def test_a_size_that_cannot_be_is_a_value_error(size: Any) -> None:
    with pytest.raises(ValueError, match="micro_batch_size"):
        cut(torch.arange(ROWS), size)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="TensorDict"):
        chunk_batch_fn({"x": torch.arange(3)}, meta(3), 1)
    with pytest.raises(ValueError, match="batch size"):
        chunk_batch_fn(TensorDict({"x": torch.arange(3)}, batch_size=[]), meta(3), 1)
