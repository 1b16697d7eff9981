"""Tensors to bytes and back, bit for bit."""

import warnings

import numpy as np
import pytest
import torch

from dataplane.codec.dtypes import CARRIER, DTYPE, as_tensor, byte_view, dtype_name, dtype_of
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.errors import InvalidRequest

NAMES = sorted(DTYPE)


def random_bits(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern of the dtype, NaN payloads included; only booleans keep to 0 and 1."""
    count = int(np.prod(shape)) if shape else 1
    high = 2 if name == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, high, count * ITEM_BYTES[name]).astype(np.uint8)
    return as_tensor(raw, name).reshape(shape)


def test_the_installed_torch_has_every_dtype_of_the_format():
    assert set(DTYPE) == set(ITEM_BYTES) - {OBJECT}


@pytest.mark.parametrize("name", NAMES)
def test_an_item_has_the_bytes_that_the_format_says(name: str):
    assert DTYPE[name].itemsize == ITEM_BYTES[name]
    assert CARRIER[name].itemsize == ITEM_BYTES[name]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_bits_survive(name: str, shape: tuple[int, ...]):
    tensor = random_bits(name, shape)
    view = byte_view(tensor, "x")
    assert view.format == "B"
    assert view.ndim == 1
    assert view.nbytes == tensor.numel() * ITEM_BYTES[name]
    back = as_tensor(np.frombuffer(bytearray(view), np.uint8), name)
    assert back.dtype == tensor.dtype
    assert back.shape == (tensor.numel(),)
    assert bytes(byte_view(back, "x")) == bytes(view)


@pytest.mark.parametrize("name", NAMES)
def test_a_contiguous_tensor_is_not_copied(name: str):
    tensor = random_bits(name, (4, 3))
    view = np.frombuffer(byte_view(tensor, "x"), np.uint8)
    assert view.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_zero_length(name: str, shape: tuple[int, ...]):
    tensor = random_bits(name, shape)
    assert tensor.shape == shape
    assert byte_view(tensor, "x") == b""
    empty = as_tensor(np.empty(0, np.uint8), name)
    assert (empty.dtype, empty.shape) == (DTYPE[name], (0,))


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch makes strided complex32 contiguous
@pytest.mark.parametrize("name", NAMES)
def test_any_strides_equal_the_contiguous_copy(name: str):
    tensor = random_bits(name, (4, 6))
    rows = [[tensor[i, j].reshape(1) for j in range(6)] for i in range(4)]

    def expected(order: list[torch.Tensor]) -> bytes:
        return b"".join(bytes(byte_view(item, "x")) for item in order)

    transposed = [rows[i][j] for j in range(6) for i in range(4)]
    assert bytes(byte_view(tensor.t(), "x")) == expected(transposed)
    strided = [rows[i][j] for i in (1, 3) for j in (0, 2, 4)]
    assert bytes(byte_view(tensor[1::2, ::2], "x")) == expected(strided)
    assert bytes(byte_view(tensor[1, 1].expand(3), "x")) == expected([rows[1][1]] * 3)


def test_known_bits():
    assert bytes(byte_view(torch.tensor([1.0]).to(torch.float8_e4m3fn), "x")) == b"\x38"
    nan = torch.tensor([0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert bytes(byte_view(nan, "x")) == b"\xc1\x7f\x80\x3f"
    assert bytes(byte_view(torch.tensor([True, False]), "x")) == b"\x01\x00"
    assert byte_view(torch.zeros(3, 4, dtype=torch.bfloat16), "x").nbytes == 24


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch resolves conjugates by a copy
@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_a_conjugate_is_stored_as_its_values(name: str):
    half = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}[name]
    tensor = torch.tensor([[1.0, 2.0], [3.0, -4.0]]).to(DTYPE[half]).view(DTYPE[name])
    plain = torch.tensor([[1.0, -2.0], [3.0, 4.0]]).to(DTYPE[half])
    assert tensor.conj().is_conj()
    assert bytes(byte_view(tensor.conj(), "x")) == bytes(byte_view(plain, "x"))


def test_a_lazy_negative_and_lazy_zeros_are_stored_as_their_values():
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert imaginary.is_neg()
    assert bytes(byte_view(imaginary, "x")) == np.float32(-2).tobytes()
    assert bytes(byte_view(torch._efficientzerotensor(2), "x")) == bytes(8)


def test_a_tensor_that_needs_grad_is_stored_without():
    leaf = torch.ones(2, requires_grad=True)
    assert bytes(byte_view(leaf, "x")) == bytes(byte_view(torch.ones(2), "x"))
    assert bytes(byte_view(leaf * 2, "x")) == bytes(byte_view(torch.full((2,), 2.0), "x"))
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert byte_view(parameter, "x").nbytes == 4


class Sub(torch.Tensor):
    pass


def nested_tensors() -> list[torch.Tensor]:
    rows = [torch.ones(2), torch.ones(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strided nested tensors are a prototype, says torch
        return [torch.nested.nested_tensor(rows, layout=x) for x in (torch.strided, torch.jagged)]


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize", "ignore:.*deprecated")
@pytest.mark.parametrize("kind", range(7))
def test_what_is_not_dense_data_is_refused_by_name(kind: int):
    makers = [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.ones(2).as_subclass(Sub),
        lambda: nested_tensors()[0],
        lambda: nested_tensors()[1],
    ]
    with pytest.raises(InvalidRequest, match="field 'x'"):
        byte_view(makers[kind](), "field 'x'")


def test_names_are_checked():
    with pytest.raises(InvalidRequest, match="no dtype 'int3'"):
        dtype_of("int3")
    with pytest.raises(InvalidRequest, match=r"here: dtype torch\.quint8"):
        dtype_name(torch.quint8, "here")


def test_a_misaligned_buffer_works():
    raw = np.frombuffer(b"\0" + np.arange(3).tobytes(), np.uint8)[1:]
    assert as_tensor(raw.copy(), "int64").tolist() == [0, 1, 2]
    shifted = np.frombuffer(bytearray(b"\0" + np.arange(3).tobytes()), np.uint8)[1:]
    tensor = as_tensor(shifted, "int64")
    assert tensor.add_(1).tolist() == [1, 2, 3]


def test_a_tensor_shares_its_buffer_and_a_read_only_one_without_a_warning():
    own = np.zeros(8, np.uint8)
    as_tensor(own, "int64").fill_(-1)
    assert own.tolist() == [255] * 8
    fixed = np.frombuffer(np.arange(3).tobytes(), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(fixed, "int64")
    del fixed
    assert tensor.tolist() == [0, 1, 2]
