"""Torch and numpy dtypes by name, and the bytes of a tensor without a detour.

Owns the step between a tensor and its bytes, both ways. Never looks at a value: bits go in and
the same bits come out, NaN payloads and padding of booleans included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.errors import InvalidRequest

DTYPE: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in ITEM_BYTES if name != OBJECT and hasattr(torch, name)
}
"""Torch dtype by name: those that the installed torch has."""

DTYPE_NAME: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPE.items()}

NUMPY_DTYPE: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Numpy dtype by name: the dtypes that numpy and torch share."""

NUMPY_NAME: Final[dict[np.dtype[np.generic], str]] = {d: n for n, d in NUMPY_DTYPE.items()}

_CARRIER_BY_SIZE: Final[dict[int, np.dtype[np.generic]]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int16"),
    4: np.dtype("int32"),
    8: np.dtype("int64"),
    16: np.dtype("complex128"),
}

CARRIER: Final[dict[str, np.dtype[np.generic]]] = {
    name: NUMPY_DTYPE.get(name, _CARRIER_BY_SIZE[size]) for name, size in ITEM_BYTES.items()
}
"""The numpy dtype in which elements of a dtype are moved: its own, else an integer as wide."""

# The same for a tensor whose dtype numpy lacks: viewed as an integer it is numpy's again.
_TORCH_CARRIER: Final[dict[torch.dtype, torch.dtype]] = {
    dtype: getattr(torch, CARRIER[name].name)
    for name, dtype in DTYPE.items()
    if name not in NUMPY_DTYPE
}

_EMPTY: Final = memoryview(b"")

from_numpy: Final = cast(
    "Callable[[npt.NDArray[Any]], torch.Tensor]",
    torch.from_numpy,  # pyright: ignore[reportUnknownMemberType] (untyped in torch)
)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name. InvalidRequest if the installed torch has none."""
    dtype = DTYPE.get(name)
    if dtype is None:
        raise InvalidRequest(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype, place: str) -> str:
    """The name of a torch dtype. InvalidRequest, naming the place, if it cannot be stored."""
    name = DTYPE_NAME.get(dtype)
    if name is None:
        raise InvalidRequest(f"{place}: dtype {dtype} cannot be stored; dequantize or cast it")
    return name


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """True for a dense, unnested torch.Tensor (no subclass) that holds data, on any device."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
    )


def plain(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """The tensor without autograd. InvalidRequest, naming the place, if it is not dense data."""
    if type(tensor) is torch.nn.Parameter:
        tensor = tensor.detach()
    if is_plain(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_nested:
        what, hint = "a nested tensor", "it can be a whole column, not a row or part of a value"
    elif tensor.is_meta:
        what, hint = "a tensor on the meta device", "it holds no data"
    elif type(tensor) is not torch.Tensor:
        what, hint = f"a {type(tensor).__name__}", "convert it to a plain torch.Tensor"
    else:
        what, hint = f"a tensor of layout {tensor.layout}", "call to_dense() first"
    raise InvalidRequest(f"{place}: {what} cannot be stored; {hint}")


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, viewed as integers of its width if its dtype is one that numpy lacks."""
    carrier = _TORCH_CARRIER.get(tensor.dtype)
    if carrier is None:
        return tensor
    return tensor.resolve_conj().resolve_neg().view(carrier)


def byte_view(tensor: torch.Tensor, place: str) -> memoryview:
    """The bytes of a tensor in row-major order: its own memory if that is contiguous on the CPU.

    Raises InvalidRequest, naming the place, for a tensor that is not dense data.
    """
    if type(tensor) is torch.Tensor and tensor.dtype not in _TORCH_CARRIER:
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError):
            pass  # It needs one of the steps below; asking numpy is cheaper than asking for each.
        else:
            return array_bytes(array)
    tensor = plain(tensor, place)
    dtype_name(tensor.dtype, place)
    tensor = integers(tensor).cpu().resolve_conj().resolve_neg()
    try:
        array = tensor.numpy()
    except RuntimeError:
        array = tensor.clone().numpy()  # torch's lazy zeros become real ones
    return array_bytes(array)


def array_bytes(array: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of a numpy array in row-major order: its own memory if that is contiguous."""
    if not array.size:
        return _EMPTY
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.data.cast("B")


class _Writable:
    """Lends numpy the memory of a read-only array as if it could be written.

    Torch has no read-only tensors and warns about every read-only buffer. The memory behind a
    view is a read-only mapping, and what happens on a write is said there.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.array = array  # keeps the memory alive
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def as_tensor(buffer: npt.NDArray[np.uint8], name: str) -> torch.Tensor:
    """A flat tensor of the named dtype over the buffer's own memory, at any alignment."""
    dtype = dtype_of(name)
    # Numpy sets the width first: torch refuses to change the width of an empty tensor.
    tensor = over(buffer.view(CARRIER[name]))
    return tensor if name in NUMPY_DTYPE else tensor.view(dtype)


def over(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the memory of a numpy array, a read-only one too."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return from_numpy(array)
