"""Python values as JSON text: the same value of the same types comes back, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.cli.values.plain_values import from_text, to_plain, to_text
from dataplane.codec import objects
from dataplane.codec.dtypes import DTYPE_NAME
from dataplane.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 90), 1 << 90), st.floats(),
    st.complex_numbers(), st.text(), st.sampled_from(["$", "$bytes", "$$x"]), st.binary(),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.sampled_from(["$", "$map", "$$"]), st.integers(), st.binary())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.text(), inner),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    text = to_text(value)
    assert text.isascii()
    assert text.isprintable()
    json.loads(text, parse_constant=pytest.fail)
    # Packed, NaNs and zeros of either sign are told apart.
    assert objects.pack(from_text(text)) == objects.pack(value)


@pytest.mark.parametrize("dtype", sorted(DTYPE_NAME, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_are_carried(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape)) * size
    tensor = (torch.arange(count) % 2).to(torch.uint8).view(dtype).view(shape)
    back = from_text(to_text({"x": [tensor]}))["x"][0]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert objects.pack(back) == objects.pack(tensor)


@pytest.mark.parametrize(
    "value",
    [np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(0.1), np.str_("a"), np.bytes_(b"a")],
    ids=str,
)
def test_numpy_values_are_carried(value: Any) -> None:
    back = from_text(to_text(value))
    assert type(back) is type(value)
    assert objects.pack(back) == objects.pack(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "NaN", "[Infinity]", '{"$x": 1}', '{"$bytes": 1}', '{"$bytes": "!"}',
        '{"$float": "00"}', '{"$float": 1}', '{"$map": 1}', '{"$map": [[1]]}',
        '{"$map": [[[1], 2]]}', '{"$tuple": 1}', '{"$complex": [1]}', '{"$tensor": []}',
        '{"$tensor": ["int64", [1], ""]}', '{"$tensor": ["object", [1], "AA=="]}',
        '{"$tensor": ["int64", [-1], "AAAAAAAAAAA="]}', '{"$tensor": ["nope", [0], ""]}',
        '{"$array": ["bfloat16", [1], "AAA="]}', '{"$array": ["object", [0], ""]}',
        '{"$array": ["int64", ["1"], "AAAAAAAAAAA="]}', '{"a": 1, "$b": 2}', "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_stands_for_no_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        from_text(text)


def test_what_no_field_can_hold_is_refused() -> None:
    for value in ({1, 2}, object(), bytearray(b"a")):
        with pytest.raises(InvalidRequest):
            to_plain(value)
