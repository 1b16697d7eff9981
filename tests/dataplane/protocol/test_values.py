"""Values cross the outside protocol unchanged, or are refused with the place of what cannot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.protocol.values import (
    MAX_DEPTH,
    from_value,
    pack_object,
    tags_from,
    tags_to,
    tensor_bytes,
    to_value,
    unpack_object,
)
from dataplane.v1 import dataplane_pb2 as pb

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: True is not 1, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return one == other


@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    message = pb.Value.FromString(to_value(value).SerializeToString())
    assert same(from_value(message), value)
    assert same(unpack_object(pack_object(value)), value)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_tags_come_back(tags: dict[str, Any]) -> None:
    assert same(tags_from(pb.Tags.FromString(tags_to(tags).SerializeToString())), tags)


def deep(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = [value] if i % 2 else {"a": value}
    return value


def test_the_deepest_value_that_is_taken_can_be_parsed() -> None:
    value = deep(MAX_DEPTH)
    assert from_value(pb.Value.FromString(to_value(value).SerializeToString())) == value
    with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} levels"):
        to_value(deep(MAX_DEPTH + 1))


def test_a_deeper_message_is_refused_and_one_without_end_is_no_value() -> None:
    message = pb.Value(int_value=1)
    for _ in range(MAX_DEPTH + 1):
        message = pb.Value(list_value=pb.ListValue(items=[message]))
    with pytest.raises(InvalidRequest, match="levels deep"):
        from_value(message)
    data = b""
    for _ in range(400):  # nested lists, as bytes
        item = b"\x0a" + _varint(len(data)) + data
        data = b"\x3a" + _varint(len(item)) + item
    with pytest.raises(InvalidRequest, match=r"not a Value|levels deep"):
        unpack_object(data)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 63, "over 64 bits"),
        ({1: 2}, "a key is a string"),
        ({"a": [object()]}, r"value\['a'\]\[0\]: a object cannot travel"),
        ("\ud800", "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        (1j, "complex cannot travel"),
        (np.array([object()]), "numpy array of object cannot travel"),
        ({1, 2}, "set cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        to_value(value)


def test_numpy_scalars_become_the_numbers_that_they_are() -> None:
    value = [np.int32(3), np.float64(0.5), np.bool_(True)]
    assert same(from_value(to_value(value)), [3, 0.5, True])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        torch.arange(8).reshape(2, 4).t(),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_tensor_keeps_its_dtype_shape_and_bits(tensor: torch.Tensor) -> None:
    def again(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        return raw.view(getattr(torch, dtype)).reshape(shape)

    back = from_value(to_value(tensor), again)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert tensor_bytes(back) == tensor_bytes(tensor)


def test_numpy_has_bfloat16_as_exact_float32() -> None:
    values = torch.tensor([1.5, -2.0, 1e30], dtype=torch.bfloat16)
    back = from_value(to_value(values))
    assert back.dtype == np.float32
    assert back.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "said"),
    [
        ("int64", [2], b"\0" * 8, "8 bytes for int64"),
        ("int64", [-1, -1], b"\0" * 8, "shape"),
        ("object", [1], b"\0", "unknown dtype"),
        ("evil", [1], b"\0", "unknown dtype"),
        ("uint8", [1 << 40, 1 << 40], b"", "0 bytes for uint8"),
        ("uint8", [1] * 9, b"\0", "shape"),
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_refused(
    dtype: str, shape: list[int], data: bytes, said: str
) -> None:
    message = pb.Value(tensor_value=pb.TensorValue(dtype=dtype, shape=shape, data=data))
    with pytest.raises(InvalidRequest, match=said):
        from_value(message)


def test_a_value_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="says nothing"):
        from_value(pb.Value())
    with pytest.raises(InvalidRequest, match="not a Value"):
        unpack_object(b"\xff\xff\xff")
