"""What callers put, in every accepted form, as a block that its template explains."""

import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from dataplane.codec.dtypes import DTYPE, as_tensor, byte_view
from dataplane.codec.encode import encode_batch, encode_row
from dataplane.codec.encoded import SERIAL_ITEMS, Encoded
from dataplane.codec.objects import unpack
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.codec.template import Template
from dataplane.errors import InvalidRequest, SchemaMismatch

NAMES = sorted(DTYPE)


def decode(encoded: Encoded) -> dict[str, list[object]]:
    """The rows of a block by field, read from nothing but its bytes and its template."""
    block = b"".join(encoded.pieces)
    assert len(block) == encoded.nbytes
    assert all(len(piece) == memoryview(piece).nbytes > 0 for piece in encoded.pieces)

    target = bytearray(b"\xee" * (encoded.nbytes + 64))
    encoded.write_into(memoryview(target))
    assert target[: encoded.nbytes] == block
    assert target[encoded.nbytes :] == b"\xee" * 64

    template = Template.parse(encoded.template.blob)
    rows = encoded.rows
    assert template.block_bytes(encoded.lengths, rows) == encoded.nbytes
    assert struct.unpack_from("<IIII", block)[2:] == (rows, template.num_free)
    lengths = np.frombuffer(encoded.lengths, np.int32).reshape(template.num_free, 1, rows)
    layout = template.layout(lengths, rows)
    fields: dict[str, list[object]] = {}
    for c, column in enumerate(template.columns):
        values: list[object] = []
        for r in range(rows):
            start, size = layout.offsets[c, 0, r], layout.nbytes[c, 0, r]
            data = np.frombuffer(bytearray(block[start : start + size]), np.uint8)
            if column.dtype == OBJECT:
                values.append(unpack(data))
                continue
            first = template.first_free[c]
            free = iter(lengths[first : first + len(column.free), 0, r].tolist())
            shape = [size if size >= 0 else next(free) for size in column.dims]
            values.append(as_tensor(data, column.dtype).reshape(shape))
        fields[column.name] = values
    return fields


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), bytes(byte_view(tensor, "x"))


def check(rows: object, expected: list[torch.Tensor]) -> None:
    assert isinstance(rows, list)
    assert [bits(row) for row in rows] == [bits(row) for row in expected]


def random_bits(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape))
    high = 2 if name == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, high, count * ITEM_BYTES[name]).astype(np.uint8)
    return as_tensor(raw, name).reshape(shape)


def keys(n: int) -> list[str]:
    return [f"k{i}" for i in range(n)]


def column(encoded: Encoded, name: str = "x"):
    return encoded.template.columns[encoded.template.index[name]]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


# One row


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_any_dtype_and_rank(name: str, shape: tuple[int, ...]):
    tensor = random_bits(name, shape)
    encoded = encode_row("k", {"x": tensor})
    check(decode(encoded)["x"], [tensor])
    ragged = len(shape) - 1 if shape else None
    dims = (*shape[:-1], -1) if shape else ()
    assert column(encoded) == ("x", name, ragged, dims)


def test_a_row_of_every_form():
    fields = {
        "tensor": torch.arange(3),
        "array": np.arange(4, dtype=np.float32),
        "big_endian": np.arange(3, dtype=">i2"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar_array": np.array(2.5),
        "text": "hello",
        "nothing": None,
        "number": 3,
        "numpy_number": np.float32(1.5),
        "list": [1, 2],
        "map": {"a": torch.ones(2)},
        "wrapped": NonTensorData({"b": 1}),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "memmap": np.arange(2, dtype=np.uint16).view(np.ndarray),
    }
    back = decode(encode_row("k", fields))
    check(back["tensor"], [torch.arange(3)])
    check(back["array"], [torch.arange(4, dtype=torch.float32)])
    check(back["big_endian"], [torch.arange(3, dtype=torch.int16)])
    check(back["fortran"], [torch.arange(6).view(2, 3)])
    check(back["scalar_array"], [torch.tensor(2.5, dtype=torch.float64)])
    check(back["parameter"], [torch.ones(2)])
    check(back["memmap"], [torch.tensor([0, 1], dtype=torch.uint16)])
    assert back["text"] == ["hello"]
    assert back["nothing"] == [None]
    assert back["number"] == [3]
    assert type(back["numpy_number"][0]) is np.float32
    assert back["list"] == [[1, 2]]
    assert back["map"][0]["a"].tolist() == [1, 1]
    assert back["wrapped"] == [{"b": 1}]


def test_a_row_may_come_as_a_tensordict():
    td = TensorDict({"x": torch.arange(3), "s": "hello"}, [])
    back = decode(encode_row("k", td))
    check(back["x"], [torch.arange(3)])
    assert back["s"] == ["hello"]
    with pytest.raises(InvalidRequest, match=r"batch size \[2\].*kv_batch_put"):
        encode_row("k", TensorDict({"x": torch.zeros(2, 3)}, [2]))


def test_known_fields_are_ragged_where_they_are_declared():
    fields = {"routed_experts": torch.zeros(7, 4), "position_ids": torch.zeros(3, 8)}
    encoded = encode_row("k", fields)
    assert column(encoded, "routed_experts")[2:] == (0, (-1, 4))
    assert column(encoded, "position_ids")[2:] == (1, (3, -1))


def test_no_fields_are_a_block_of_its_front_alone():
    assert decode(encode_row("k", {})) == {}
    assert decode(encode_batch(keys(3), {})) == {}


def test_no_keys_are_nothing():
    for fields in ({}, {"x": torch.zeros(0, 3)}, {"x": []}, [], {"x": np.zeros(0)}, {"x": ()}):
        encoded = encode_batch([], fields)
        assert (encoded.rows, encoded.nbytes, encoded.pieces) == (0, 0, [])
        encoded.write_into(memoryview(bytearray(0)))
    with pytest.raises(InvalidRequest, match="'x' has 2 rows for 0 keys"):
        encode_batch([], {"x": torch.zeros(2)})


def test_templates_of_equal_puts_are_one_object():
    one = encode_row("a", {"x": torch.zeros(3), "y": torch.zeros(2, 5)})
    other = encode_row("b", {"x": torch.zeros(9), "y": torch.zeros(2, 7)})
    assert one.template is other.template
    many = encode_batch(keys(2), {"x": torch.zeros(2, 9), "y": torch.zeros(2, 2, 7)})
    assert many.template is one.template
    assert encode_row("a", {"x": torch.zeros(3).int()}).template is not one.template


# A batch


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch makes strided complex32 contiguous
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 0), (3, 2, 4), (1, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_a_dense_column_of_any_dtype(name: str, shape: tuple[int, ...]):
    tensor = random_bits(name, shape)
    fields = {"x": tensor, "y": tensor.transpose(0, -1).contiguous().transpose(0, -1)}
    back = decode(encode_batch(keys(shape[0]), fields))
    check(back["x"], list(tensor))
    check(back["y"], list(tensor))


def test_a_dense_column_is_one_piece_of_the_callers_memory():
    tensor = torch.arange(6.0).view(2, 3)
    encoded = encode_batch(keys(2), {"x": tensor})
    assert len(encoded.pieces) == 3  # front, column, padding
    assert np.frombuffer(encoded.pieces[1]).__array_interface__["data"][0] == tensor.data_ptr()
    assert encoded.nbytes == 64 + 64


def test_a_jagged_column_is_one_piece_of_the_callers_memory():
    tensor = jagged([torch.arange(3), torch.arange(5)])
    encoded = encode_batch(keys(2), {"x": tensor})
    piece = np.frombuffer(encoded.pieces[1], np.uint8)
    assert piece.__array_interface__["data"][0] == tensor.values().data_ptr()
    assert column(encoded) == ("x", "int64", 0, (-1,))
    check(decode(encoded)["x"], [torch.arange(3), torch.arange(5)])


def test_a_slice_stores_only_its_own_bytes():
    row = torch.zeros(1_000_000)[500:510]
    encoded = encode_row("k", {"x": row})
    assert encoded.nbytes == 64 + 64
    assert [len(piece) for piece in encoded.pieces] == [64, 40, 24]
    encoded = encode_batch(["k"], {"x": torch.zeros(10, 1_000_000)[3:4, 5:15]})
    assert [len(piece) for piece in encoded.pieces] == [64, 40, 24]


def test_big_rows_of_a_list_are_a_piece_each_and_small_ones_are_joined():
    rows = [torch.rand(n) for n in (3000, 5000)]
    encoded = encode_batch(keys(2), {"x": rows, "y": [torch.zeros(3), torch.zeros(4)]})
    pieces = [np.frombuffer(piece, np.uint8) for piece in encoded.pieces]
    assert pieces[1].__array_interface__["data"][0] == rows[0].data_ptr()
    assert pieces[2].__array_interface__["data"][0] == rows[1].data_ptr()
    assert len(pieces[3]) == 28
    check(decode(encoded)["x"], rows)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", NAMES)
def test_a_list_of_rows_of_any_dtype(name: str):
    ragged = [random_bits(name, (n,), n) for n in (3, 0, 1, 900)]
    strided = [random_bits(name, (n, 2), n).t() for n in (3, 0, 1, 5)]
    scalars = [random_bits(name, (), n) for n in range(4)]
    back = decode(encode_batch(keys(4), {"r": ragged, "s": strided, "0": scalars}))
    check(back["r"], ragged)
    check(back["s"], strided)
    check(back["0"], scalars)


def test_rows_longer_than_a_run_are_joined_in_order():
    sizes = [5, SERIAL_ITEMS - 5, SERIAL_ITEMS, 7, 40_000, 100, 0, 33_000, 1]
    rows = [torch.rand(n) for n in sizes]
    rows[4] = torch.rand(80_000)[::2]
    check(decode(encode_batch(keys(len(sizes)), {"x": rows}))["x"], rows)
    bf16 = [row.to(torch.bfloat16) for row in rows]
    check(decode(encode_batch(keys(len(sizes)), {"x": bf16}))["x"], bf16)


def test_rows_that_need_grad_or_are_conjugate():
    base = torch.tensor([1 + 2j, 3 - 4j])
    fields = {
        "grad": [torch.ones(2, requires_grad=True), torch.ones(3)],
        "dense_grad": torch.ones(2, 3, requires_grad=True) * 2,
        "conj": [base.conj(), base],
        "dense_conj": base.view(2, 1).conj(),
        "neg": [base.conj().imag, base.imag],
        "dense_neg": base.conj().imag,
        "expanded": torch.tensor([7]).expand(2, 3),
    }
    back = decode(encode_batch(keys(2), fields))
    check(back["grad"], [torch.ones(2), torch.ones(3)])
    check(back["dense_grad"], [torch.full((3,), 2.0)] * 2)
    check(back["conj"], [torch.tensor([1 - 2j, 3 + 4j]), base])
    check(back["dense_conj"], [torch.tensor([1 - 2j]), torch.tensor([3 + 4j])])
    check(back["neg"], [torch.tensor([-2.0, 4.0]), torch.tensor([2.0, -4.0])])
    check(back["dense_neg"], [torch.tensor(-2.0), torch.tensor(4.0)])
    check(back["expanded"], [torch.full((3,), 7)] * 2)
    one = decode(encode_row("k", {"c": base.conj(), "n": base.conj().imag}))
    check(one["c"], [torch.tensor([1 - 2j, 3 + 4j])])
    check(one["n"], [torch.tensor([-2.0, 4.0])])


def test_arrays_as_columns_and_as_rows():
    read_only = np.arange(3)
    read_only.flags.writeable = False
    fields = {
        "dense": np.arange(6, dtype=np.int16).reshape(2, 3),
        "strided": np.arange(6).reshape(3, 2).T,
        "big_endian": np.arange(2, dtype=">f4"),
        "rows": [np.arange(2.0), np.arange(3.0)],
        "read_only": [read_only, np.arange(2)],
        "mixed": [np.arange(2), torch.arange(3)],
        "text": np.array(["a", "bc"]),
        "objects": np.array([{"a": 1}, None], dtype=object),
    }
    back = decode(encode_batch(keys(2), fields))
    check(back["dense"], list(torch.arange(6, dtype=torch.int16).view(2, 3)))
    check(back["strided"], [torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])])
    check(back["big_endian"], [torch.tensor(0.0), torch.tensor(1.0)])
    check(back["rows"], [torch.arange(2.0).double(), torch.arange(3.0).double()])
    check(back["read_only"], [torch.arange(3), torch.arange(2)])
    check(back["mixed"], [torch.arange(2), torch.arange(3)])
    assert back["text"] == ["a", "bc"]
    assert back["objects"] == [{"a": 1}, None]


def test_python_values_as_columns():
    fields = {
        "equal_text": ["q", "q"],
        "numbers": (1, 2.5),
        "lists": [[1, 2], []],
        "mixed": [torch.ones(2), None],
        "one_for_all": NonTensorData({"a": 1}),
        "sized_one_for_all": NonTensorData("s", batch_size=[2]),
        "stack": NonTensorStack("a", [1, (2,)]),
        "wrapped": [NonTensorData("a"), NonTensorData("b")],
        "wrapped_tensors": [NonTensorData(torch.ones(1)), NonTensorData(torch.ones(2))],
    }
    back = decode(encode_batch(keys(2), fields))
    assert back["equal_text"] == ["q", "q"]
    assert back["numbers"] == [1, 2.5]
    assert back["lists"] == [[1, 2], []]
    assert back["mixed"][0].tolist() == [1, 1]
    assert back["mixed"][1] is None
    assert back["one_for_all"] == [{"a": 1}] * 2
    assert back["sized_one_for_all"] == ["s", "s"]
    assert back["stack"] == ["a", [1, (2,)]]
    assert back["wrapped"] == ["a", "b"]
    check(back["wrapped_tensors"], [torch.ones(1), torch.ones(2)])
    assert decode(encode_batch(["k"], {"x": ["q"]}))["x"] == ["q"]
    assert decode(encode_batch(["k"], {"x": NonTensorStack("q")}))["x"] == ["q"]


def test_a_batch_as_a_tensordict():
    rows = [torch.arange(2), torch.arange(4)]
    td = TensorDict(
        {"x": jagged(rows), "d": torch.ones(2, 3), "0": torch.zeros(2), "s": ["a", "b"]}, [2]
    )
    back = decode(encode_batch(keys(2), td))
    check(back["x"], rows)
    check(back["d"], [torch.ones(3)] * 2)
    check(back["0"], [torch.tensor(0.0)] * 2)
    assert back["s"] == ["a", "b"]


def test_a_batch_as_a_lazy_stack_of_unequal_rows():
    rows = [TensorDict({"x": torch.ones(n), "s": f"s{n}"}, []) for n in (3, 5)]
    back = decode(encode_batch(keys(2), LazyStackedTensorDict(*rows)))
    check(back["x"], [torch.ones(3), torch.ones(5)])
    assert back["s"] == ["s3", "s5"]
    assert decode(encode_batch(keys(2), rows))["s"] == ["s3", "s5"]


def test_a_batch_as_rows():
    rows = [{"x": torch.ones(n), "y": n, "z": torch.tensor(n)} for n in (1, 2, 0)]
    back = decode(encode_batch(keys(3), rows))
    check(back["x"], [torch.ones(1), torch.ones(2), torch.ones(0)])
    check(back["z"], [torch.tensor(n) for n in (1, 2, 0)])
    assert back["y"] == [1, 2, 0]


# Nested tensors


def test_strided_nested_is_taken_row_by_row():
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strided nested tensors are a prototype, says torch
        tensor = torch.nested.nested_tensor(rows, layout=torch.strided)
    encoded = encode_batch(keys(2), {"x": tensor})
    check(decode(encoded)["x"], rows)
    assert column(encoded)[2:] == (0, (-1, 3))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", NAMES)
def test_jagged_of_every_dtype_and_either_ragged_dimension(name: str):
    flat = random_bits(name, (9, 2))
    offsets = torch.tensor([0, 3, 3, 9])
    first = torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)
    check(decode(encode_batch(keys(3), {"x": first}))["x"], [flat[:3], flat[3:3], flat[3:]])
    wide = random_bits(name, (2, 9))
    last = torch.nested.nested_tensor_from_jagged(wide, offsets=offsets, jagged_dim=2)
    encoded = encode_batch(keys(3), {"x": last})
    check(decode(encoded)["x"], [wide[:, :3], wide[:, 3:3], wide[:, 3:]])
    assert column(encoded)[2:] == (1, (2, -1))


def test_jagged_with_holes_with_a_lead_and_with_grad():
    values = torch.arange(10.0, requires_grad=True)
    holes = torch.nested.nested_tensor_from_jagged(
        values, offsets=torch.tensor([1, 4, 9, 10]), lengths=torch.tensor([2, 3, 0])
    )
    check(
        decode(encode_batch(keys(3), {"x": holes}))["x"],
        [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 5.0, 6.0]), torch.empty(0)],
    )
    lead = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([1, 4, 9]))
    rows = decode(encode_batch(keys(2), {"x": lead}))["x"]
    check(rows, [torch.arange(1.0, 4.0), torch.arange(4.0, 9.0)])


def test_jagged_of_no_rows():
    empty = torch.nested.nested_tensor_from_jagged(torch.empty(0), offsets=torch.tensor([0]))
    assert encode_batch([], {"x": empty}).rows == 0


# Which dimension is ragged (scenario 3)


@pytest.mark.parametrize(
    ("name", "shapes", "ragged", "dims"),
    [
        ("x", [(3, 5), (3, 5)], 1, (3, -1)),
        ("x", [(3, 5)], 1, (3, -1)),
        ("x", [(3, 5), (3, 7)], 1, (3, -1)),
        ("x", [(2, 3), (4, 3)], 0, (-1, 3)),
        ("x", [(2, 4), (3, 5)], 1, (-1, -1)),
        ("x", [(2, 4, 7), (3, 5, 7)], 2, (-1, -1, -1)),
        ("x", [(2, 4, 7), (2, 5, 7)], 1, (2, -1, 7)),
        ("position_ids", [(2, 3), (4, 3)], 1, (-1, -1)),
        ("routed_experts", [(4, 3), (4, 3)], 0, (-1, 3)),
        ("routed_experts", [(4, 3), (4, 5)], 0, (-1, -1)),
        ("x", [(1,), (1,)], 0, (-1,)),
    ],
)
def test_the_ragged_dimension_is_declared_or_the_last_or_the_one_that_differs(
    name: str, shapes: list[tuple[int, ...]], ragged: int, dims: tuple[int, ...]
):
    rows = [torch.rand(shape) for shape in shapes]
    encoded = encode_batch(keys(len(rows)), {name: rows})
    assert column(encoded, name)[2:] == (ragged, dims)
    check(decode(encoded)[name], rows)


def test_rows_that_torch_nests_in_the_wrong_dimension():
    rows = [torch.rand(3, 5), torch.rand(3, 5)]
    encoded = encode_batch(keys(2), {"x": jagged(rows)})
    assert column(encoded)[2:] == (1, (3, -1))
    assert np.frombuffer(encoded.lengths, np.int32).tolist() == [5, 5]
    check(decode(encoded)["x"], rows)


# Refusals


@tensorclass
class Sample:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": torch.zeros(3)}, "field 'x' has 3 rows for 2 keys"),
        ({"x": [1]}, "field 'x' has 1 rows for 2 keys"),
        ({"x": np.zeros((1, 2))}, "field 'x' has 1 rows for 2 keys"),
        ({"x": jagged([torch.ones(1)])}, "field 'x' has 1 rows for 2 keys"),
        ({"x": NonTensorStack("a")}, "field 'x' has 1 rows for 2 keys"),
        ({"x": NonTensorData("a", batch_size=[3])}, "field 'x' has 3 rows for 2 keys"),
        ({"x": torch.tensor(1)}, "field 'x': a 0-d value is one row"),
        ({"x": np.array(1)}, "field 'x': a 0-d value is one row"),
        ({"x": "ab"}, "field 'x': a column of many rows is .* not a str"),
        ({"x": {0: 1, 1: 2}}, "field 'x': a column of many rows is .* not a dict"),
        ({"x": None}, "field 'x': .* not a NoneType"),
        ({"x": [1, {2}]}, r"field 'x' of key 'k1': value: a set"),
        ({"x": [torch.ones(1), torch.eye(2).to_sparse()]}, "field 'x' of key 'k1': .*sparse"),
        ({"x": [torch.ones(1), torch.ones(1, device="meta")]}, "field 'x' of key 'k1': .*meta"),
        ({"x": torch.ones(2, device="meta")}, "field 'x': .*meta"),
        ({"x": torch.eye(2).to_sparse()}, "field 'x': .*sparse"),
        ({"x": [jagged([torch.ones(1)]), torch.ones(1)]}, "field 'x' of key 'k0': a nested"),
        ({"x": np.array(["2020", "2021"], "datetime64[Y]")}, "field 'x': a numpy array of dat"),
        ({"x": np.zeros(2, "i4,f4")}, "field 'x': a numpy array of"),
        ({"x": np.zeros(2, np.longdouble)}, "field 'x': a numpy array of"),
        ({"x": np.array([["a"], ["b"]])}, "field 'x': a numpy array of <U1"),
        ({"x": np.ma.masked_array([1, 2])}, "field 'x': a MaskedArray"),
        ({"x": [np.array(["a"]), np.array(["b"])]}, "field 'x': a numpy array of <U1"),
        ({"x": TensorDict({"y": torch.zeros(2)}, [2])}, "field 'x' is itself a TensorDict"),
        ({"x": torch.zeros(2, *[1] * 9)}, "field 'x': rows of 9 dimensions; at most 8"),
        ({"x": torch.zeros(2, 1 << 31, 0)}, "field 'x': a dimension of 2147483648"),
        ({"x": torch.zeros(2, 0, 1 << 31)}, "field 'x' of key 'k0': a row of 2147483648"),
        ({1: torch.zeros(2)}, "the name of a field is a string, not 1"),
        ({"": torch.zeros(2)}, "the name of a field has 1 to 256 bytes"),
        ({"é" * 129: torch.zeros(2)}, "has 1 to 256 bytes, not 258"),
        ({"\ud800": torch.zeros(2)}, "is not text"),
        ({f"f{i}": torch.zeros(2) for i in range(1025)}, "1025 fields in one put; at most 1024"),
        (TensorDict({"x": torch.zeros(3)}, [3]), r"batch size \[3\] for 2 keys"),
        (TensorDict({"x": torch.zeros(3)}, []), r"batch size \[\] for 2 keys"),
        (TensorDict({"n": {"x": torch.zeros(2)}}, [2]), "field 'n' is itself a TensorDict"),
        (Sample(torch.zeros(2), batch_size=[2]), "not a Sample"),
        ("ab", "fields are .* not a str"),
        (None, "fields are .* not a NoneType"),
        ([{"x": 1}], "2 keys, but fields for 1 rows"),
        ([TensorDict({"x": torch.zeros(1, 3)}, [1])] * 2, r"key 'k0' are .* batch size \[1\]"),
        ([{"x": 1}, 2], "the fields of key 'k1' are a int, not a mapping"),
        ([{"x": 1}, {"y": 1}], "key 'k1' lacks 'x', which key 'k0' has"),
        ([{"x": 1, "y": 1}, {"x": 1}], "key 'k1' lacks 'y', which key 'k0' has"),
        ([{"x": 1}, {"x": 1, "y": 1}], "key 'k0' lacks 'y', which key 'k1' has"),
    ],
)
def test_a_batch_is_refused_with_its_culprit(fields: object, message: str):
    with pytest.raises(InvalidRequest, match=message):
        encode_batch(keys(2), fields)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1}, "field 'x' of key 'k': value: a set"),
        (torch.eye(2).to_sparse(), "field 'x' of key 'k': .*sparse"),
        (jagged([torch.ones(2)]), "field 'x' of key 'k': a nested tensor"),
        (torch.empty(1, device="meta"), "field 'x'.*meta"),
        (np.array(["a"]), "field 'x': a numpy array of <U1"),
        (np.array([None]), "field 'x': a numpy array of object"),
        (TensorDict({"y": torch.zeros(2)}, [2]), "field 'x' of key 'k' is itself a TensorDict"),
        (torch.zeros([1] * 9), "field 'x': rows of 9 dimensions"),
        (torch.zeros(0, 1 << 31), "key 'k': a row of 2147483648 entries"),
        (torch.zeros(1 << 31, 0), "field 'x': a dimension of 2147483648"),
    ],
)
def test_a_row_is_refused_with_its_culprit(value: object, message: str):
    with pytest.raises(InvalidRequest, match=message):
        encode_row("k", {"x": value})


@pytest.mark.parametrize("fields", [None, [1], "ab", 3])
def test_the_fields_of_a_row_are_a_mapping(fields: object):
    with pytest.raises(InvalidRequest, match=r"key 'k' are a .* not a mapping"):
        encode_row("k", fields)  # pyright: ignore[reportArgumentType] (the point of the test)


def test_too_many_keys():
    with pytest.raises(InvalidRequest, match="65537 keys in one put; at most 65536"):
        encode_batch(["k"] * 65_537, {})


def test_rows_of_another_dtype_or_rank_are_named():
    ids = [torch.zeros(3, dtype=torch.int64)] * 3
    with pytest.raises(SchemaMismatch, match=r"'ids' of key 'k2' is torch\.float32") as caught:
        encode_batch(keys(4), {"ids": [*ids[:2], torch.tensor([]), ids[2]]})
    assert (caught.value.keys, caught.value.fields) == (["k2"], ["ids"])
    with pytest.raises(SchemaMismatch) as caught:  # the odd one is not the first one's victim
        encode_batch(keys(4), {"ids": [torch.tensor([]), *ids]})
    assert caught.value.keys == ["k0"]
    with pytest.raises(SchemaMismatch, match=r"of shape .* with 1 dimensions") as caught:
        encode_batch(keys(4), {"ids": [*ids, torch.zeros(1, 3, dtype=torch.int64)]})
    assert caught.value.keys == ["k3"]
    with pytest.raises(SchemaMismatch):
        encode_batch(keys(2), {"ids": [np.zeros(1), np.zeros(1, np.float32)]})


def test_writing_into_too_little_room():
    for encoded in (
        encode_row("k", {"x": torch.zeros(3)}),
        encode_batch(keys(2), {"x": torch.zeros(2, 3)}),
    ):
        with pytest.raises(ValueError, match="128 bytes do not fit in 100"):
            encoded.write_into(memoryview(bytearray(100)))


def test_the_source_is_not_changed_and_names_may_be_anything():
    source = {"x": torch.arange(3), "../\0\n": [1]}
    back = decode(encode_row("k", source))
    assert list(back) == ["x", "../\0\n"]
    assert source["x"].tolist() == [0, 1, 2]


# Any columns


@st.composite
def tensor_columns(draw: st.DrawFn, rows: int) -> tuple[object, list[torch.Tensor]]:
    """A column in one of its forms, and its rows."""
    name = draw(st.sampled_from([n for n in NAMES if n != "complex32"]))
    rank = draw(st.integers(0, 3))
    base = draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
    loose = draw(st.sets(st.integers(0, max(rank - 1, 0)), max_size=rank)) if rank else set()
    shapes = [
        tuple(draw(st.integers(0, 4)) if d in loose else size for d, size in enumerate(base))
        for _ in range(rows)
    ]
    seed = draw(st.integers(0, 9))
    values = [random_bits(name, shape, seed + i) for i, shape in enumerate(shapes)]
    if rank > 1 and draw(st.booleans()):
        values = [value.transpose(0, -1).contiguous().transpose(0, -1) for value in values]
    if len(set(shapes)) == 1 and draw(st.booleans()):
        return torch.stack(values), values
    if rank == 1 and draw(st.booleans()):
        lengths = [0, *np.cumsum([len(value) for value in values]).tolist()]
        return (
            torch.nested.nested_tensor_from_jagged(
                torch.cat(values), offsets=torch.tensor(lengths)
            ),
            values,
        )
    if draw(st.booleans()) and values[0].dtype not in columns_without_numpy():
        return [value.numpy() for value in values], values
    return values, values


def columns_without_numpy() -> set[torch.dtype]:
    return {DTYPE[name] for name in NAMES if name.startswith(("bfloat", "float8", "complex32"))}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_batch_round_trips(data: st.DataObject):
    rows = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(0, 4))
    drawn = {f"f{i}": data.draw(tensor_columns(rows)) for i in range(count)}
    objects = data.draw(st.lists(st.one_of(st.text("ab"), st.none()), min_size=rows, max_size=rows))
    fields: dict[str, object] = {name: value for name, (value, _) in drawn.items()}
    back = decode(encode_batch(keys(rows), {**fields, "o": objects}))
    assert back.pop("o") == objects
    assert list(back) == list(fields)
    for name, (_, values) in drawn.items():
        check(back[name], values)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_row_round_trips_and_equals_a_batch_of_one(data: st.DataObject):
    drawn = {
        f"f{i}": data.draw(tensor_columns(1))[1][0] for i in range(data.draw(st.integers(1, 4)))
    }
    encoded = encode_row("k", drawn)
    for name, value in decode(encoded).items():
        check(value, [drawn[name]])
    batch = encode_batch(["k"], {name: [value] for name, value in drawn.items()})
    assert b"".join(batch.pieces) == b"".join(encoded.pieces)
    assert batch.template is encoded.template
