"""Rows to containers: the four layouts, their exact numbers, and what they never depend on."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dataplane.codec.containers import (
    SCATTER_BELOW_ITEMS,
    FieldData,
    Offsets,
    as_list,
    nested,
    packed,
    padded,
    to_tensordict,
    trim_rows,
)
from dataplane.codec.dtypes import DTYPE, as_tensor, byte_view
from dataplane.codec.objects import pack
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.errors import InvalidRequest

NAMES = sorted(DTYPE)


def field(
    rows: list[torch.Tensor],
    ragged_dim: int | None = -1,
    *,
    rank: int | None = None,
    dtype: str | None = None,
    read_only: bool = False,
) -> FieldData:
    """The rows as a reader brings them. `rank` and `dtype` speak where there are no rows."""
    rank = rows[0].ndim if rank is None else rank
    if ragged_dim is not None:
        ragged_dim %= rank
    data = b"".join(bytes(byte_view(row, "x")) for row in rows)
    buffer = np.frombuffer(data if read_only else bytearray(data), np.uint8)
    shapes = np.array([row.shape for row in rows], np.int32).reshape(len(rows), rank)
    name = dtype or str(rows[0].dtype).removeprefix("torch.")
    return FieldData("x", name, rank, ragged_dim, buffer, shapes)


def scalars(values: list[torch.Tensor]) -> FieldData:
    return field(values, None, rank=0)


def values(items: list[object]) -> FieldData:
    parts = [pack(item) for item in items]
    buffer = np.frombuffer(bytearray(b"".join(parts)), np.uint8)
    shapes = np.array([len(part) for part in parts], np.int32).reshape(-1, 1)
    return FieldData("x", OBJECT, 1, 0, buffer, shapes)


def random_bits(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape))
    high = 2 if name == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, high, count * ITEM_BYTES[name]).astype(np.uint8)
    return as_tensor(raw, name).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), bytes(byte_view(tensor, "x"))


def check(rows: object, expected: list[torch.Tensor]) -> None:
    assert [bits(row) for row in rows] == [bits(row) for row in expected]


def ragged(name: str = "int64") -> list[torch.Tensor]:
    return [random_bits(name, (n,), n) for n in (3, 0, 2)]


# Bits, in every layout


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        ([(3,), (0,), (2,)], 0),
        ([(4,), (4,)], 0),
        ([(3, 2), (1, 2)], 0),
        ([(2, 3), (2, 0), (2, 1)], 1),
        ([(2, 3, 2), (2, 1, 2)], 1),
        ([(2, 5), (2, 5)], 1),
        ([(2, 5)], 1),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_every_layout_keeps_the_bits(
    name: str, shapes: list[tuple[int, ...]], dim: int, read_only: bool
):
    rows = [random_bits(name, shape, i) for i, shape in enumerate(shapes)]
    lengths = [shape[dim] for shape in shapes]

    def data() -> FieldData:
        return field(rows, dim, read_only=read_only)

    tensor = nested(data())
    assert tensor.is_nested
    assert tensor.layout is torch.jagged
    assert tensor.offsets().tolist() == [0, *np.cumsum(lengths)]
    check(tensor.unbind(), rows)

    check(as_list(data()), rows)

    dense, widths = padded(data(), 1)
    assert widths.tolist() == lengths
    assert widths.dtype is torch.int32
    assert dense.shape[dim + 1] == max(lengths)
    check([row.narrow(dim, 0, n) for row, n in zip(dense, lengths, strict=True)], rows)

    joined, starts = packed(data())
    assert starts.tolist() == [0, *np.cumsum(lengths)]
    assert starts.dtype is torch.int32
    check(
        [joined.narrow(dim, a, n) for a, n in zip(starts.tolist(), lengths, strict=False)],
        rows,
    )


@pytest.mark.parametrize("name", NAMES)
def test_scalars_are_dense_in_every_layout(name: str):
    rows = [random_bits(name, (), i) for i in range(3)]
    for container in (nested(scalars(rows)), padded(scalars(rows))[0], packed(scalars(rows))[0]):
        assert container.shape == (3,)
        check(container, rows)
    check(as_list(scalars(rows)), rows)
    assert padded(scalars(rows))[1] is None
    assert packed(scalars(rows))[1] is None
    assert nested(scalars(rows[:1])).shape == (1,)


def test_values_are_a_list_in_every_layout():
    items = [None, {"a": [1, (2,)]}, "q", "q", b"", 3]
    for container in (
        nested(values(items)),
        padded(values(items))[0],
        packed(values(items))[0],
        as_list(values(items)),
    ):
        assert container == items
    assert nested(values(["q"])) == ["q"]
    assert nested(values([])) == []
    assert padded(values(items))[1] is None
    assert packed(values(items))[1] is None


# The container follows the schema (scenarios 3 and 5)


def test_equal_lengths_and_a_single_row_change_nothing():
    a, b, c = torch.rand(3, 5), torch.rand(3, 5), torch.rand(3, 7)
    for rows, lengths, columns in (([a, b], [5, 5], 10), ([a], [5], 5), ([a, c], [5, 7], 12)):
        tensor = nested(field(rows))
        assert tensor.is_nested
        assert tensor.shape[:2] == (len(rows), 3)
        assert tensor.values().shape == (3, columns)
        assert tensor.offsets().diff().tolist() == lengths
        check(tensor.unbind(), rows)
        assert packed(field(rows))[0].shape == (3, columns)
        assert padded(field(rows))[0].shape == (len(rows), 3, max(lengths))
        assert padded(field(rows))[1].tolist() == lengths
        check(as_list(field(rows)), rows)
    assert torch.equal(packed(field([a, c]))[0], torch.cat([a, c], 1))


def test_singletons_stay_rows():
    one = nested(field([torch.tensor([1]), torch.tensor([2])]))
    assert one.is_nested
    assert padded(field([torch.tensor([1]), torch.tensor([2])]))[0].tolist() == [[1], [2]]
    two = nested(field([torch.tensor([1]), torch.tensor([1, 2])]))
    assert [row.tolist() for row in two.unbind()] == [[1], [1, 2]]


def test_scalar_rewards():
    assert nested(scalars([torch.tensor(1.0), torch.tensor(0.5)])).tolist() == [1.0, 0.5]


# Zero length (scenario 4)


def test_zero_length_rows_keep_their_place():
    rows = [torch.tensor(row, dtype=torch.int64) for row in ([1, 2, 3], [], [4, 5])]
    tensor = nested(field(rows))
    assert tensor.offsets().tolist() == [0, 3, 3, 5]
    assert tensor.values().tolist() == [1, 2, 3, 4, 5]
    dense, lengths = padded(field(rows), -1)
    assert dense.tolist() == [[1, 2, 3], [-1, -1, -1], [4, 5, -1]]
    assert lengths.tolist() == [3, 0, 2]
    assert packed(field(rows))[1].tolist() == [0, 3, 3, 5]
    assert [row.tolist() for row in as_list(field(rows))] == [[1, 2, 3], [], [4, 5]]


def test_only_empty_rows():
    rows = [torch.empty(0), torch.empty(0)]
    tensor = nested(field(rows))
    assert tensor.offsets().tolist() == [0, 0, 0]
    assert [row.shape for row in tensor.unbind()] == [(0,), (0,)]
    dense, lengths = padded(field(rows), -1)
    assert dense.shape == (2, 0)
    assert lengths.tolist() == [0, 0]
    joined, starts = packed(field(rows))
    assert (joined.shape, starts.tolist()) == ((0,), [0, 0, 0])
    check(as_list(field(rows)), rows)


@pytest.mark.parametrize(("rank", "dim"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_no_rows(rank: int, dim: int):
    data = field([], dim, rank=rank, dtype="int64")
    tensor = nested(data)
    assert (tensor.size(0), tensor.dtype, tensor.unbind()) == (0, torch.int64, ())
    dense, lengths = padded(data)
    assert dense.shape == (0,) * (rank + 1)
    assert (lengths.shape, lengths.dtype) == ((0,), torch.int32)
    joined, starts = packed(data)
    assert joined.shape == (0,) * rank
    assert (starts.tolist(), starts.dtype) == ([0], torch.int32)
    assert as_list(data) == []
    assert nested(field([], None, rank=0, dtype="bool")).shape == (0,)
    assert as_list(field([], None, rank=0, dtype="bool")) == []


# Nested


def test_torch_pads_what_comes_back_to_the_widest_row():
    tensor = nested(field([torch.tensor([1]), torch.tensor([2, 3, 4])]))
    assert torch.nested.to_padded_tensor(tensor, 0).tolist() == [[1, 0, 0], [2, 3, 4]]
    assert torch.nested.to_padded_tensor(nested(field([torch.empty(0)] * 2)), 0).shape == (2, 0)


def test_fields_of_equal_lengths_can_be_added_if_they_share_offsets():
    rows = ragged("int64")
    shared: Offsets = {}
    a, b = nested(field(rows), shared), nested(field(rows), shared)
    check((a + b).unbind(), [row + row for row in rows])
    other = nested(field([torch.ones(1, dtype=torch.int64)] * 3), shared)
    assert other.offsets().tolist() == [0, 1, 2, 3]
    assert len(shared) == 2


def test_rows_that_differ_in_another_dimension_too_need_the_list_layout():
    rows = [torch.rand(2, 4), torch.rand(3, 5)]
    check(as_list(field(rows)), rows)
    for layout in (nested, padded, packed):
        with pytest.raises(
            InvalidRequest, match=r"'x' is ragged in dimension 1.*dimension 0 \(2 to 3\).*list"
        ):
            layout(field(rows))


# Independence (scenario 6)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_editing_a_row_leaves_its_twin(rank: int):
    row = torch.ones([2] * rank)
    data = field([row, row], -1 if rank else None, rank=rank)
    first, second = as_list(data)
    first.add_(1)
    assert torch.equal(second, row)
    for container in (nested(field([row, row], -1 if rank else None, rank=rank)),):
        rows = container.unbind()
        rows[0].add_(1)
        assert torch.equal(rows[1], row)


def test_rows_of_a_list_take_part_in_autograd():
    first, second = as_list(field([torch.ones(2), torch.ones(3)]))
    first.requires_grad_()
    (first * 2).sum().backward()
    second.mul_(3)
    assert first.grad.tolist() == [2, 2]
    assert second.tolist() == [3, 3, 3]


# Padding


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_the_value_in_the_fields_dtype(name: str):
    rows = [random_bits(name, (n,)) for n in (1, 3)]
    dense, _ = padded(field(rows), 1)
    if name == "float8_e8m0fnu":
        one = torch.tensor([127], dtype=torch.uint8).view(DTYPE[name])
    elif name == "complex32":
        one = torch.tensor([1, 0], dtype=torch.float16).view(DTYPE[name])
    else:
        one = torch.ones(1).to(DTYPE[name])
    check([dense[0, 1:2], dense[0, 2:]], [one, one])


@pytest.mark.parametrize("count", [1, SCATTER_BELOW_ITEMS // 2 - 1, 2 * SCATTER_BELOW_ITEMS])
@pytest.mark.parametrize("trail", [(), (3,)])
def test_short_and_long_rows_are_padded_alike(count: int, trail: tuple[int, ...]):
    rows = [torch.rand(n, *trail) for n in (count, 0, 2 * count, 1)]
    dense, _ = padded(field(rows, 0), -7)
    expected = torch.full((4, 2 * count, *trail), -7.0)
    for target, row in zip(expected, rows, strict=True):
        target[: len(row)] = row
    assert torch.equal(dense, expected)


@pytest.mark.parametrize(
    ("name", "pad"),
    [
        ("uint8", -1), ("uint8", 256), ("int64", 0.5), ("int64", float("nan")), ("int64", 2**63),
        ("int64", "0"), ("int64", None), ("bool", 2), ("float32", "0"), ("float32", 1j),
        ("float32", 1e300), ("float16", 1e6), ("bfloat16", "x"), ("bfloat16", 1j),
        ("uint64", -1), ("complex64", None),
    ],
)  # fmt: skip
def test_padding_that_the_dtype_does_not_have_is_refused(name: str, pad: object):
    rows = [random_bits(name, (n,)) for n in (1, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidRequest, match=f"field 'x': .* is no value of {name}"):
            padded(field(rows), pad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "pad", "comes_back"),
    [
        ("int64", -100, -100),
        ("int64", -100.0, -100),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("float32", float("-inf"), float("-inf")),
        ("bool", True, True),
        ("bfloat16", 0.1, 0.10009765625),
        ("float64", np.float32(0.5), 0.5),
        ("complex64", 1j, 1j),
    ],
)
def test_padding_values(name: str, pad: object, comes_back: object):
    dense, _ = padded(field([random_bits(name, (n,)) for n in (0, 1)]), pad)
    assert dense[0, 0].item() == comes_back


# Packed


def test_a_pack_of_a_fixed_length():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    joined, starts = packed(field(rows), total=6, pad=-1)
    assert joined.tolist() == [1, 2, 3, 4, -1, -1]
    assert starts.tolist() == [0, 3, 4]
    assert packed(field(rows), total=4)[0].tolist() == [1, 2, 3, 4]
    wide = [torch.arange(6).view(2, 3), torch.arange(2).view(2, 1)]
    assert packed(field(wide), total=5, pad=9)[0].tolist() == [[0, 1, 2, 0, 9], [3, 4, 5, 1, 9]]
    first = packed(field([row.t() for row in wide], 0), total=5, pad=9)[0]
    assert first.tolist() == [[0, 3], [1, 4], [2, 5], [0, 1], [9, 9]]
    with pytest.raises(InvalidRequest, match="'x': the 2 rows have 4 entries in all, over the 3"):
        packed(field(rows), total=3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_pack_into_the_callers_tensor(name: str, dim: int):
    rows = [random_bits(name, (2, n), n) for n in (3, 1)]
    rows = [row if dim else random_bits(name, (row.shape[1], 2)) for row in rows]
    expected, _ = packed(field(rows, dim))
    shape = (2, 6) if dim else (6, 2)
    raw = np.zeros(12 * ITEM_BYTES[name], np.uint8)
    out = as_tensor(raw, name).view(shape)
    back, starts = packed(field(rows, dim), out=out, pad=1)
    assert back is out
    assert starts.tolist() == [0, 3, 4]
    check([out.narrow(dim, 0, 4)], [expected])
    whole, _ = packed(field(rows, dim), total=6, pad=1)
    check([out], [whole])
    exact = as_tensor(np.zeros(8 * ITEM_BYTES[name], np.uint8), name)
    exact = exact.view((2, 4) if dim else (4, 2))
    packed(field(rows, dim), out=exact)
    check([exact], [expected])


def test_a_pack_into_a_strided_tensor_and_one_that_needs_grad():
    rows = [torch.ones(2), torch.ones(1)]
    out = torch.zeros(6)[::2]
    packed(field(rows), out=out)
    assert out.tolist() == [1, 1, 1]
    leaf = torch.zeros(3, requires_grad=True)
    packed(field(rows), out=leaf)
    assert leaf.tolist() == [1, 1, 1]
    assert leaf.is_leaf
    rewards = torch.zeros(2)
    assert packed(scalars([torch.tensor(1.0), torch.tensor(2.0)]), out=rewards)[0] is rewards
    assert rewards.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("out", "total", "message"),
    [
        (torch.zeros(4), None, r"out= is torch\.float32 \[4\], needed is torch\.int64 \[4\]"),
        (torch.zeros(3, dtype=torch.int64), None, "4 entries in all, over the 3"),
        (torch.zeros(2, 4, dtype=torch.int64), None, r"needed is torch\.int64 \[4\]"),
        (torch.zeros((), dtype=torch.int64), None, r"needed is torch\.int64 \[4\]"),
        (torch.zeros(5, dtype=torch.int64), 6, r"needed is torch\.int64 \[6\]"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, total: int | None, message: str):
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    before = out.clone()
    with pytest.raises(InvalidRequest, match=f"field 'x'.*{message}"):
        packed(field(rows), out=out, total=total)
    assert torch.equal(out, before)


def test_values_have_no_out():
    with pytest.raises(InvalidRequest, match="'x' holds Python values"):
        packed(values([1]), out=torch.zeros(1))
    with pytest.raises(InvalidRequest, match=r"needed is torch\.float32 \[1\]"):
        packed(scalars([torch.tensor(1.0)]), out=torch.zeros(2))


def test_a_pack_longer_than_int32_offsets_is_refused():
    shapes = np.full((3, 1), 2**30, np.int32)
    data = FieldData("x", "bool", 1, 0, np.empty(0, np.uint8), shapes)
    with pytest.raises(InvalidRequest, match="3221225472 entries in one pack"):
        packed(data)


# Trim


def test_trim_cuts_both_ends_of_every_row():
    rows = [torch.arange(10, 14), torch.arange(20, 22), torch.arange(30, 36)]
    data = field(rows)
    nbytes = data.lengths.astype(np.int64) * 8
    offsets = np.cumsum(nbytes) - nbytes
    at, size, lengths = trim_rows("x", ["a", "b", "c"], offsets, nbytes, data.lengths, 1, 1)
    assert lengths.tolist() == [2, 0, 4]
    assert lengths.dtype == np.int32
    cut = [data.buffer[a : a + n].view(np.int64).tolist() for a, n in zip(at, size, strict=True)]
    assert cut == [[11, 12], [], [31, 32, 33, 34]]
    same = trim_rows("x", ["a", "b", "c"], offsets, nbytes, data.lengths, 0, 0)
    assert [array.tolist() for array in same] == [
        array.tolist() for array in (offsets, nbytes, data.lengths)
    ]


def test_trim_of_rows_of_rows_counts_in_the_first_dimension():
    rows = [torch.arange(6).view(3, 2), torch.arange(4).view(2, 2)]
    data = field(rows, 0)
    nbytes = np.array([48, 32])
    at, size, lengths = trim_rows("x", ["a", "b"], np.array([0, 48]), nbytes, data.lengths, 0, 1)
    assert (at.tolist(), size.tolist(), lengths.tolist()) == ([0, 48], [32, 16], [2, 1])


def test_trim_of_no_rows_and_of_rows_too_short():
    none = np.zeros(0, np.int64)
    assert [len(a) for a in trim_rows("x", [], none, none, none.astype(np.int32), 1, 1)] == [0] * 3
    lengths = np.array([2, 0, 1], np.int32)
    sizes = lengths.astype(np.int64)
    with pytest.raises(InvalidRequest, match=r"'x': \(1, 1\) cuts 2 .* key 'b' has 0.* 1 more"):
        trim_rows("x", ["a", "b", "c"], sizes, sizes, lengths, 1, 1)
    for head, tail in ((-1, 0), (0, -1)):
        with pytest.raises(InvalidRequest, match="is negative"):
            trim_rows("x", ["a", "b", "c"], sizes, sizes, lengths, head, tail)


# TensorDict


def test_containers_of_a_get_as_a_tensordict():
    rows = ragged("int64")
    td = to_tensordict(
        {
            "nested": nested(field(rows)),
            "padded": padded(field(rows))[0],
            "score": nested(scalars([torch.tensor(float(i)) for i in range(3)])),
            "text": nested(values(["q", "q", "q"])),
            "mixed": nested(values([[1, 2], {"a": ()}, None])),
            "list": as_list(field(rows)),
        },
        3,
    )
    assert td.batch_size == (3,)
    check(td["nested"].unbind(), rows)
    assert td["padded"].shape == (3, 3)
    assert td["score"].tolist() == [0, 1, 2]
    assert td.get("text").tolist() == ["q", "q", "q"]
    assert td.get("mixed").tolist() == [[1, 2], {"a": ()}, None]
    check(td.get("list").tolist(), rows)


def test_a_tensordict_of_no_rows_and_of_one():
    td = to_tensordict(
        {"x": nested(field([], 0, rank=1, dtype="int64")), "s": nested(values([]))}, 0
    )
    assert td.batch_size == (0,)
    assert td.get("s").tolist() == []
    one = to_tensordict({"s": nested(values(["q"]))}, 1)
    assert one.get("s").tolist() == ["q"]
    assert isinstance(to_tensordict({}, 2), TensorDict)


def test_a_pack_is_no_tensordict():
    with pytest.raises(InvalidRequest, match=r"'x' of shape \[5\] has no dimension of the 3 rows"):
        to_tensordict({"x": packed(field(ragged()))[0]}, 3)


# Any rows


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_layouts_agree_on_any_rows(data: st.DataObject):
    name = data.draw(st.sampled_from(NAMES))
    rank = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, rank - 1))
    base = data.draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    shapes = [(*base[:dim], n, *base[dim + 1 :]) for n in lengths]
    rows = [random_bits(name, shape, i) for i, shape in enumerate(shapes)]
    check(as_list(field(rows, dim)), rows)
    check(nested(field(rows, dim)).unbind(), rows)
    dense, widths = padded(field(rows, dim), 1)
    check([row.narrow(dim, 0, n) for row, n in zip(dense, widths.tolist(), strict=True)], rows)
    total = sum(lengths) + data.draw(st.integers(0, 3))
    joined, starts = packed(field(rows, dim), total=total, pad=1)
    assert joined.shape == (*base[:dim], total, *base[dim + 1 :])
    check([joined.narrow(dim, a, n) for a, n in zip(starts.tolist(), lengths, strict=False)], rows)
