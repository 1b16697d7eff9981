"""What was put is what is got, bit for bit: every dtype, shape and stride through a real plane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataplane.codec.dtypes import DTYPE_NAME
from dataplane.errors import InvalidRequest

DTYPES = sorted(DTYPE_NAME, key=str)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHAPES = ((), (0,), (1,), (5,), (3, 4), (0, 4), (2, 0), (2, 1, 3), (70_000,))
"""Shapes of a row; the last one is over the limit of small puts in most dtypes."""


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of arbitrary bits; of valid ones for bool."""
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def bits(value: torch.Tensor) -> list[int]:
    return value.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_every_dtype_and_shape_keeps_its_bits(
    client: Any, partition: str, dtype: torch.dtype
) -> None:
    put = {f"f{i}": filled(shape, dtype) for i, shape in enumerate(SHAPES)}
    client.kv_put("k", partition, put)
    assert client.status()["bytes_in_use"] == sum(value.nbytes for value in put.values())
    got = client.kv_batch_get(["k"], partition, layout="list")
    for name, value in put.items():
        row = got[name][0]
        assert (row.dtype, row.shape) == (dtype, value.shape)
        assert bits(row) == bits(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nested", "padded", "packed"])
def test_ragged_rows_of_every_dtype_keep_their_bits_in_every_layout(
    client: Any, partition: str, dtype: torch.dtype, layout: str
) -> None:
    rows = [filled((length,), dtype) for length in (3, 0, 5)]
    client.kv_batch_put(["a", "b", "c"], partition, {"x": rows})
    got = client.kv_batch_get(["c", "b", "a"], partition, layout=layout)["x"]
    assert got.dtype == dtype
    if layout == "nested":
        assert bits(got.values()) == bits(rows[2]) + bits(rows[0])
        assert got.offsets().tolist() == [0, 5, 5, 8]
    elif layout == "packed":
        assert bits(got) == bits(rows[2]) + bits(rows[0])
    else:
        zero = [0] * got.element_size()
        assert tuple(got.shape) == (3, 5)
        assert bits(got[0]) == bits(rows[2])
        assert bits(got[1]) == zero * 5
        assert bits(got[2]) == bits(rows[0]) + zero * 2


STRIDED = {
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "every second": lambda: torch.arange(20)[::2],
    "column": lambda: torch.arange(12).view(3, 4)[:, 1],
    "expanded": lambda: torch.tensor([1, 2]).expand(3, 2),
    "permuted": lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "0-d of a row": lambda: torch.arange(5)[3],
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_a_tensor_of_any_strides_equals_its_copy(client: Any, partition: str, make: Any) -> None:
    value = make()
    client.kv_put("a", partition, {"x": value})
    client.kv_batch_put(["b", "c"], partition, {"x": [value, value]})
    want = value.clone().resolve_conj().resolve_neg()
    for row in client.kv_batch_get(["a", "b", "c"], partition, layout="list")["x"]:
        assert torch.equal(row, want)
    assert client.status()["bytes_in_use"] == 3 * want.nbytes


ARRAYS = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
).split()


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_come_back_as_tensors_of_the_same_dtype(
    client: Any, partition: str, name: str
) -> None:
    array = np.arange(6).reshape(2, 3).astype(name)
    client.kv_batch_put(["a", "b"], partition, {"x": array})
    client.kv_put("c", partition, {"x": array[0]})
    client.kv_put("d", partition, {"x": array.T[1:, 0]})
    rows = client.kv_batch_get(["a", "b", "c", "d"], partition, layout="list")["x"]
    for row, want in zip(rows, [array[0], array[1], array[0], array[0, 1:]], strict=True):
        assert np.array_equal(row.numpy(), want)
        assert row.numpy().dtype == array.dtype


def test_big_endian_numbers_are_stored_by_value(client: Any, partition: str) -> None:
    client.kv_put("k", partition, {"x": np.array([1, 2], ">i4")})
    assert client.kv_batch_get(["k"], partition, layout="list")["x"][0].tolist() == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=False),
        torch.empty(2, device="meta"),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([object()], object),
    ],
    ids=["sparse", "meta", "datetime", "objects"],
)
def test_what_cannot_be_stored_bit_for_bit_is_refused_naming_the_field(
    plane: Any, partition: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match="'odd'"):
        plane.witness.kv_put("k", partition, {"odd": value})
    assert partition not in plane.witness.status()["partitions"]
