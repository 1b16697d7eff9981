"""Hashes and previews of values, as they are stored: what is compared where rows went wrong. Pure.

Owns what of a value is noted: eight bytes of a hash of its bytes, and its first elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import OBJECT

if TYPE_CHECKING:
    from dataplane.codec.encoded import Encoded
    from dataplane.codec.foreign import Foreign

HASH_BYTES: Final = 8
PREVIEW_ITEMS: Final = 8
MAX_PREVIEW: Final = 400

_NUMPY: Final = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip


@dataclass(slots=True)
class Noted:
    """What is noted of the values of some rows."""

    fields: list[str]
    hashes: list[list[bytes]]
    """[field][row]"""
    previews: list[list[str]]
    """The same, or nothing."""

    def add(self, name: str, hashes: list[bytes], previews: list[str]) -> None:
        """One field more."""
        self.fields.append(name)
        self.hashes.append(hashes)
        if previews:
            self.previews.append(previews)


def note_of_block(encoded: Encoded | Foreign, *, previews: bool) -> Noted:
    """What is noted of a block that was put."""
    memory = bytearray(encoded.nbytes)
    encoded.write_into(memoryview(memory))
    block = memoryview(memory)
    template, rows = encoded.template, encoded.rows
    sizes = np.frombuffer(encoded.lengths, np.int32).reshape(template.num_free, 1, rows)
    layout = template.layout(sizes, rows)
    noted = Noted([], [], [])
    for i, column in enumerate(template.columns):
        begin = int(layout.offsets[i, 0, 0])
        hashes, shown = note_of_column(
            column.dtype, block[begin:], layout.nbytes[i, 0], previews=previews
        )
        noted.add(column.name, hashes, shown)
    return noted


def note_of_column(
    dtype: str, data: memoryview, nbytes: npt.NDArray[Any], *, previews: bool
) -> tuple[list[bytes], list[str]]:
    """Hash of each of the rows that lie back to back, and the first elements if wanted."""
    hashes: list[bytes] = []
    shown: list[str] = []
    at = 0
    for size in nbytes.tolist():
        row = data[at : at + size]
        at += size
        hashes.append(blake2b(row, digest_size=HASH_BYTES).digest())
        if previews:
            shown.append(preview(dtype, bytes(row[: 16 * PREVIEW_ITEMS])))
    return hashes, shown


def preview(dtype: str, data: bytes) -> str:
    """The first elements of a value; of an object nothing but its first bytes."""
    if dtype == OBJECT:
        return repr(data[:24])
    if dtype == "bfloat16":
        whole = data[: len(data) // 2 * 2]
        wide = np.frombuffer(whole, np.uint16).astype(np.uint32) << 16
        items = wide.view(np.float32)[:PREVIEW_ITEMS]
    elif dtype in _NUMPY:
        kind = _NUMPY[dtype]
        items = np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind)
        items = items[:PREVIEW_ITEMS]
    else:
        return data[:PREVIEW_ITEMS].hex()
    return " ".join(f"{item:.6g}" if isinstance(item, float) else str(item)
                    for item in items.tolist())[:MAX_PREVIEW]  # fmt: skip
