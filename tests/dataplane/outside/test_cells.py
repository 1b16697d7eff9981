"""Blocks as cells and back: what a put brings is what a get makes containers of, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client.get import GetOptions, rows_of, trimmed
from dataplane.client.put import batch_to_put, row_to_put
from dataplane.codec.encoded import Encoded
from dataplane.errors import InvalidRequest
from dataplane.outside.cells import cells_of_block, empty_shape, gather, plan_of
from dataplane.protocol.cells import Cells, shape_from
from dataplane.types import Revision

KEYS = ["a", "b", "c"]
REVISION = Revision(1, 7)


def block(fields: dict[str, Any]) -> Encoded:
    encoded = batch_to_put(KEYS, fields, None).encoded
    assert encoded is not None
    return encoded


def bytes_of(cells: Cells) -> bytearray:
    return bytearray().join(bytes(piece) for piece in cells.pieces)


def back(cells: Cells, **options: Any) -> Any:
    """The rows that a get makes of cells, as they come from the other side."""
    shape = shape_from(cells.shape.to_columns(), cells.shape.rows)
    made = GetOptions(**{"layout": "list", **options})
    plan, sources = plan_of(list(KEYS[: shape.rows]), REVISION, shape, bytes_of(cells))
    plan = trimmed(plan, made.trim)
    return rows_of(plan, gather(plan, sources), made)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
        )
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([torch.arange(n) for n in (3, 0, 5)], id="ragged"),
        pytest.param([torch.ones(n, dtype=torch.uint8) for n in (1, 3, 2)], id="odd bytes"),
        pytest.param([torch.randn(2, n).to(torch.bfloat16) for n in (1, 4, 2)], id="bfloat16"),
        pytest.param([torch.randn(n, 5) for n in (1, 4, 2)], id="ragged first"),
        pytest.param([torch.zeros(0, 3)] * 3, id="no entries"),
        pytest.param([torch.randn(3000) for _ in range(3)], id="large rows"),
        pytest.param(["text", {"k": [1, 2.5, None, True]}, (1, b"bytes")], id="objects"),
    ],
)
def test_every_kind_of_row_comes_back(rows: list[Any]) -> None:
    fields = {"before": torch.arange(3, dtype=torch.int8), "x": rows, "after": torch.arange(3)}
    got = back(cells_of_block(KEYS, block(fields)))
    assert all(same(one, other) for one, other in zip(got["x"], rows, strict=True))
    assert torch.stack(got["before"]).tolist() == torch.stack(got["after"]).tolist() == [0, 1, 2]
    assert (got.keys, got.revision) == (KEYS, REVISION)


def test_a_single_row_is_the_same_cells_as_a_batch_of_it() -> None:
    fields = {"x": torch.arange(7, dtype=torch.int16), "s": torch.tensor(1.5), "o": {"k": "v"}}
    one = row_to_put("a", fields, None).encoded
    assert one is not None
    columns = {"x": [fields["x"]], "s": torch.tensor([1.5]), "o": [fields["o"]]}
    many = batch_to_put(["a"], columns, None).encoded
    assert many is not None
    cells = cells_of_block(["a"], one)
    assert cells.shape.nbytes == len(bytes_of(cells)) == 14 + 4 + len(bytes_of(cells)) - 18
    assert bytes_of(cells) == bytes_of(cells_of_block(["a"], many))


def test_tensors_within_values_come_back_as_tensors() -> None:
    rows = [{"t": torch.arange(4).to(dtype), "n": np.arange(3)} for dtype in
            (torch.int32, torch.bfloat16, torch.float8_e4m3fn)]  # fmt: skip
    got = back(cells_of_block(KEYS, block({"o": rows})))
    for one, other in zip(got["o"], rows, strict=True):
        assert same(one["t"], other["t"])
        assert same(one["n"], torch.arange(3))  # which of the two it was is not told outside


@pytest.mark.parametrize(
    "value", [1 << 64, 1j, {1: "a number for a name"}], ids=["large", "complex", "names"]
)
def test_a_value_that_cannot_travel_is_refused_naming_key_and_field(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"field 'o' of key 'b'"):
        cells_of_block(KEYS, block({"o": [1, value, 2]}))


def test_rows_are_trimmed_after_they_came() -> None:
    rows = [torch.arange(n) for n in (4, 3, 5)]
    got = back(cells_of_block(KEYS, block({"x": rows})), layout="packed", trim={"x": (1, 1)})
    assert got["x"].tolist() == [1, 2, 1, 1, 2, 3]
    assert got.cu_seqlens["x"].tolist() == [0, 2, 3, 6]


def test_what_comes_may_be_written_to_and_overlaps_nowhere() -> None:
    fields = {"x": [torch.arange(3)] * 3, "y": [torch.arange(3, dtype=torch.uint8)] * 3}
    got = back(cells_of_block(KEYS, block(fields)))
    got["x"][0].fill_(9)
    got["y"][2].fill_(9)
    assert [row.tolist() for row in got["x"]] == [[9, 9, 9], [0, 1, 2], [0, 1, 2]]
    assert [row.tolist() for row in got["y"]] == [[0, 1, 2], [0, 1, 2], [9, 9, 9]]


def test_no_rows_have_the_containers_of_their_columns() -> None:
    cells = cells_of_block(KEYS, block({"x": [torch.arange(3)] * 3, "s": torch.arange(3)}))
    plan, sources = plan_of([], REVISION, empty_shape(cells.shape.to_columns()), bytearray())
    rows = rows_of(plan, gather(plan, sources), GetOptions("padded"))
    assert (rows["x"].shape, rows["s"].shape) == ((0, 0), (0,))
    assert (rows["x"].dtype, rows["s"].dtype) == (torch.int64, torch.int64)
