"""Routed experts, as servers send them: base64 of an .npy file, or of plain int32 numbers.

Owns their decoding. Pure. Sizes are checked before memory is taken, and nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentloop.engines.shapes.checks import RefusedReply

FIELD: Final = "routed_experts"

_MAX_HEADER_BYTES: Final = 4096


def from_npy(value: object, *, rows: int, max_bytes: int) -> npt.NDArray[Any]:
    """Experts of `rows` tokens, [rows, layers * topk], from base64 of an .npy file."""
    raw = _Bytes(_decoded(value, max_bytes))
    try:
        version = np.lib.format.read_magic(raw)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read(raw, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, KeyError) as error:
        raise RefusedReply("experts", FIELD, f"is no .npy file that is known: {error}") from error
    if dtype.kind not in "iu" or fortran_order:
        raise RefusedReply("experts", FIELD, f"holds {dtype}, and whole numbers in C order belong")
    if len(shape) not in (2, 3) or math.prod(shape) * dtype.itemsize != len(raw.rest):
        raise RefusedReply("experts", FIELD, f"is of shape {shape} in {len(raw.rest)} bytes")
    return _as_rows(np.frombuffer(raw.rest, dtype), rows, found=shape[0])


def from_int32(value: object, *, rows: int, max_bytes: int) -> npt.NDArray[Any]:
    """Experts of `rows` tokens, [rows, layers * topk], from base64 of int32 numbers."""
    raw = _decoded(value, max_bytes)
    if len(raw) % 4:
        raise RefusedReply("experts", FIELD, f"has {len(raw)} bytes, no whole number of int32")
    return _as_rows(np.frombuffer(raw, "<i4"), rows)


def _as_rows(flat: npt.NDArray[Any], rows: int, found: int | None = None) -> npt.NDArray[Any]:
    if rows < 1 or not flat.size or flat.size % rows or found not in (None, rows):
        entries = flat.size if found is None else f"{found} rows"
        raise RefusedReply("experts", FIELD, f"has {entries}, and {rows} tokens were inputs")
    if flat.min() < 0:
        raise RefusedReply("experts", FIELD, f"names expert {flat.min()}")
    return flat.reshape(rows, -1)


def _decoded(value: object, max_bytes: int) -> bytes:
    if not isinstance(value, str):
        raise RefusedReply("experts", FIELD, f"is {type(value).__name__} and not base64 text")
    if len(value) * 3 // 4 > max_bytes:
        raise RefusedReply("experts", FIELD, f"has {len(value)} letters: over {max_bytes} bytes")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedReply("experts", FIELD, f"is not base64: {error}") from error


class _Bytes:
    """What numpy reads a file's head from."""

    def __init__(self, raw: bytes) -> None:
        self.rest = memoryview(raw)

    def read(self, length: int = -1, /) -> bytes:
        size = len(self.rest) if length < 0 else length
        taken, self.rest = self.rest[:size], self.rest[size:]
        return bytes(taken)
