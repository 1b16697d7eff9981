"""Bytes of rows, as the containers that callers get: nested, padded, list, packed.

Owns the four layouts and the rule that the container follows from the field's schema, never
from the rows that happen to be there. Never reads a block: rows come in copied, in the order of
the request. Padding and joining are done here and not by torch, whose own conversions are wrong
for some shapes.

Letters: B rows; a row has shape (lead ..., L, trail ...) with the ragged dimension at L.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from dataplane.codec import objects
from dataplane.codec.dtypes import CARRIER, NUMPY_DTYPE, as_tensor, dtype_of, integers, over
from dataplane.codec.shapes import OBJECT
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

Array: TypeAlias = npt.NDArray[Any]
Container: TypeAlias = "torch.Tensor | list[torch.Tensor] | list[Any]"
Pad: TypeAlias = bool | int | float | complex

Offsets: TypeAlias = dict[bytes, torch.Tensor]
"""Offsets by lengths, for fields that come back together: torch adds two nested tensors only if
they share one offsets tensor."""

INT32_MAX: Final = 2**31 - 1
SCATTER_BELOW_ITEMS: Final = 1024
"""Rows that are padded to less than this are copied by one mask, wider ones one by one."""


@dataclass(slots=True)
class FieldData:
    """The rows of one field, B of them, back to back."""

    name: str
    dtype: str
    rank: int
    """Dimensions of a row; 1 for object fields."""
    ragged_dim: int | None
    """From the partition's schema; None for rank 0, 0 for object fields."""
    buffer: npt.NDArray[np.uint8]
    """The rows in order and nothing else. Containers lie over it where they can, so it belongs
    to the caller of the get alone."""
    shapes: npt.NDArray[np.int32]  # [B, rank]
    """For object fields the bytes of each row."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.shapes)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[B], sizes of the ragged dimension; zeros for rank 0."""
        if self.ragged_dim is None:
            return np.zeros(self.rows, np.int32)
        return self.shapes[:, self.ragged_dim]


def nested(field: FieldData, offsets: Offsets | None = None) -> Container:
    """A jagged nested tensor; dense [B] for rank 0; a list for objects.

    Fields of equal lengths that are given the same `offsets` mapping can be added and compared.
    """
    if field.dtype == OBJECT:
        return _values(field)
    if field.ragged_dim is None:
        return as_tensor(field.buffer, field.dtype)
    joined = _as_torch(_joined(field), field.dtype)
    lengths = field.lengths
    same = lengths.tobytes()
    shared = None if offsets is None else offsets.get(same)
    if shared is None:
        shared = over(_offsets(lengths))
        if offsets is not None:
            offsets[same] = shared
    # With the widest row stated, torch's own padding is right; without, it pads to the total.
    return torch.nested.nested_tensor_from_jagged(
        joined,
        offsets=shared,
        jagged_dim=field.ragged_dim + 1,
        min_seqlen=int(lengths.min()) if len(lengths) else 0,
        max_seqlen=int(lengths.max(initial=0)),
    )


def padded(field: FieldData, pad: Pad = 0) -> tuple[Container, torch.Tensor | None]:
    """A dense tensor (B, lead ..., widest L, trail ...) and the lengths, int32 [B].

    For rank 0 dense [B] and None; for objects a list and None.
    """
    if field.dtype == OBJECT:
        return _values(field), None
    if field.ragged_dim is None:
        return as_tensor(field.buffer, field.dtype), None
    lengths = field.lengths
    lead, trail = _around(field)
    widest = int(lengths.max(initial=0))
    shape = (field.rows, *lead, widest, *trail)
    base = field.buffer.view(CARRIER[field.dtype])
    if math.prod(shape) == base.size:  # all as wide as the widest: the rows are the container
        dense = base.reshape(shape)
    else:
        dense = np.full(shape, fill(field.name, field.dtype, pad), base.dtype)
        across, along = math.prod(lead), math.prod(trail)
        _pad_rows(base, lengths, dense.reshape(field.rows, across, widest * along), along)
    return _as_torch(dense, field.dtype), over(lengths.astype(np.int32))


def as_list(field: FieldData) -> Container:
    """A list with one tensor, or one Python value, per row.

    The tensors lie side by side in one buffer and overlap nowhere.
    """
    if field.dtype == OBJECT:
        return _values(field)
    flat = as_tensor(field.buffer, field.dtype)
    if not field.rows:
        return []
    if field.ragged_dim is None:
        return list(flat.unbind())
    if field.rank == 1:
        return list(torch.split(flat, field.lengths.tolist()))
    counts = field.shapes.prod(axis=1, dtype=np.int64).tolist()
    shapes = field.shapes.tolist()
    return [row.view(shape) for row, shape in zip(torch.split(flat, counts), shapes, strict=True)]


def packed(
    field: FieldData,
    *,
    total: int | None = None,
    out: torch.Tensor | None = None,
    pad: Pad = 0,
) -> tuple[Container, torch.Tensor | None]:
    """The rows joined along the ragged dimension, and where each begins: int32 [B + 1].

    `total` is the size of the ragged dimension that comes back, `pad` fills it behind the last
    row. `out` is written instead of a new tensor and returned; its size stands for `total`.
    Rank 0 and objects come back as in the other layouts, without the second result.

    Raises InvalidRequest if the rows need more than `total`, or `out` does not fit.
    """
    if field.dtype == OBJECT or field.ragged_dim is None:
        if out is not None and field.dtype == OBJECT:
            raise InvalidRequest(f"field {field.name!r} holds Python values: out= is for tensors")
        if field.dtype == OBJECT:
            return _values(field), None
        dense = as_tensor(field.buffer, field.dtype)
        if out is None:
            return dense, None
        _check_out(field, out, (field.rows,))
        out.detach().copy_(dense)
        return out, None
    ends = _offsets(field.lengths)
    used = int(ends[-1])
    if used > INT32_MAX:
        raise InvalidRequest(
            f"field {field.name!r}: {used} entries in one pack; offsets are int32, fetch fewer"
        )
    dim = field.ragged_dim
    lead, trail = _around(field)
    if out is not None:
        size = total if total is not None else (out.shape[dim] if out.ndim == field.rank else used)
    else:
        size = used if total is None else total
    if size < used:
        raise InvalidRequest(
            f"field {field.name!r}: the {field.rows} rows have {used} entries in all, "
            f"over the {size} that were asked for"
        )
    starts = over(ends.astype(np.int32))
    if out is not None:
        _check_out(field, out, (*lead, size, *trail))
        target = out.detach()
        target.narrow(dim, 0, used).copy_(_as_torch(_joined(field), field.dtype))
        if size > used:
            cell = np.array([fill(field.name, field.dtype, pad)], CARRIER[field.dtype])
            rest = target.narrow(dim, used, size - used)
            rest.copy_(_as_torch(cell, field.dtype).expand(rest.shape))
        return out, starts
    if size == used:
        return _as_torch(_joined(field), field.dtype), starts
    whole = np.full((*lead, size, *trail), fill(field.name, field.dtype, pad), CARRIER[field.dtype])
    _joined(field, whole)
    return _as_torch(whole, field.dtype), starts


def trim_rows(
    name: str,
    keys: Sequence[str],
    offsets: npt.NDArray[np.int64],  # [B], where each row starts
    nbytes: npt.NDArray[np.int64],  # [B]
    lengths: npt.NDArray[np.int32],  # [B], sizes of the ragged dimension
    head: int,
    tail: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Offsets, bytes and lengths of the rows less their first `head` and last `tail` entries.

    For fields whose first dimension is the ragged one. Raises InvalidRequest, naming the field
    and the key, if a row is shorter than what is cut.
    """
    if head < 0 or tail < 0:
        raise InvalidRequest(f"trim of field {name!r}: ({head}, {tail}) is negative")
    cut = head + tail
    short = np.flatnonzero(lengths < cut)
    if len(short):
        i = int(short[0])
        raise InvalidRequest(
            f"trim of field {name!r}: ({head}, {tail}) cuts {cut} entries and the row of key "
            f"{keys[i]!r} has {lengths[i]}"
            + (f", as have {len(short) - 1} more rows too few" if len(short) > 1 else "")
        )
    entry = nbytes // np.maximum(lengths, 1)
    return offsets + head * entry, nbytes - cut * entry, lengths - np.int32(cut)


def to_tensordict(fields: Mapping[str, Container], rows: int) -> TensorDict:
    """The containers of one get as a TensorDict of batch size [B]; lists become NonTensorStacks.

    Raises InvalidRequest for packed fields: they have no row dimension.
    """
    # Importing tensordict takes as long as importing torch, and few processes ask for it.
    from tensordict import NonTensorStack, TensorDict

    leaves: dict[str, Any] = {}
    for name, container in fields.items():
        if isinstance(container, list):
            leaves[name] = (
                NonTensorStack(*container) if container else NonTensorStack(batch_size=[0])
            )
        elif container.shape[:1] != (rows,):
            raise InvalidRequest(
                f"field {name!r} of shape {[*container.shape]} has no dimension of the {rows} "
                "rows: a TensorDict takes the layouts nested, padded and list"
            )
        else:
            leaves[name] = container
    return TensorDict(leaves, batch_size=[rows])


def fill(name: str, dtype: str, pad: Pad) -> Any:
    """The padding value as numpy moves it (see CARRIER). InvalidRequest if it does not fit."""
    try:
        with np.errstate(over="raise", invalid="raise"):
            cell = _cell(dtype, pad)
    except (TypeError, ValueError, ArithmeticError):
        pass
    else:
        if cell is not None:
            return cell
    raise InvalidRequest(f"field {name!r}: {pad!r} is no value of {dtype} to pad with")


def _cell(dtype: str, pad: Pad) -> Any:
    if isinstance(pad, complex) and not dtype.startswith("complex"):
        raise TypeError
    if not isinstance(pad, Number):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise TypeError
    native = cast("Any", NUMPY_DTYPE.get(dtype))
    if dtype == "complex32":
        halves = np.array([complex(pad).real, complex(pad).imag], np.float16)
        return halves.view(np.int32)[0]
    if native is None:  # bfloat16 and the float8 kinds
        cell = torch.tensor([float(cast("float", pad))]).to(dtype_of(dtype))
        return integers(cell).numpy()[0]
    value = np.array(pad).astype(native)[()]
    rounds = native.kind in "fc"
    return value if rounds or value == pad else None


def _values(field: FieldData) -> list[Any]:
    buffer = field.buffer.data
    ends = _offsets(field.shapes[:, 0]).tolist()
    return [objects.unpack(buffer[start:end]) for start, end in itertools.pairwise(ends)]


def _offsets(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _as_torch(array: Array, dtype: str) -> torch.Tensor:
    tensor = over(array)
    return tensor if dtype in NUMPY_DTYPE else tensor.view(dtype_of(dtype))


def _around(field: FieldData) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions before and behind the ragged one. InvalidRequest if rows disagree."""
    dim = cast("int", field.ragged_dim)
    if field.rank == 1:
        return (), ()
    if not field.rows:
        return (0,) * dim, (0,) * (field.rank - dim - 1)
    first = field.shapes[0]
    differ = (field.shapes != first).any(axis=0)
    differ[dim] = False
    if differ.any():
        other = int(differ.argmax())
        sizes = sorted(set(field.shapes[:, other].tolist()))
        raise InvalidRequest(
            f"field {field.name!r} is ragged in dimension {dim}, but its rows also differ in "
            f"dimension {other} ({sizes[0]} to {sizes[-1]}); get it with layout='list'"
        )
    shape = cast("list[int]", first.tolist())
    return tuple(shape[:dim]), tuple(shape[dim + 1 :])


def _joined(field: FieldData, out: Array | None = None) -> Array:
    """The rows along the ragged dimension: (lead ..., sum of L, trail ...), in `out` if given."""
    lead, trail = _around(field)
    base = field.buffer.view(CARRIER[field.dtype])
    used = int(field.lengths.sum(dtype=np.int64))
    shape = (*lead, used, *trail)
    if not lead:
        joined = base.reshape(shape)
        if out is None:
            return joined
        out[:used] = joined
        return out
    whole = np.empty(shape, base.dtype) if out is None else out
    across, along = math.prod(lead), math.prod(trail)
    if base.size:
        target = whole.reshape(across, -1)
        at = start = 0
        for width in (field.lengths * np.int64(along)).tolist():
            size = width * across
            target[:, at : at + width] = base[start : start + size].reshape(across, width)
            at += width
            start += size
    return whole


def _pad_rows(base: Array, lengths: npt.NDArray[np.int32], dense: Array, along: int) -> None:
    """Copies rows (across, L * along) into the front of `dense` (B, across, widest * along)."""
    _, across, width = dense.shape
    if across == 1 and width < SCATTER_BELOW_ITEMS:
        columns = np.arange(width, dtype=np.int64)
        dense[:, 0][columns < (lengths * np.int64(along))[:, None]] = base
        return
    start = 0
    for target, length in zip(dense, (lengths * np.int64(along)).tolist(), strict=True):
        size = across * length
        target[:, :length] = base[start : start + size].reshape(across, length)
        start += size


def _check_out(field: FieldData, out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.dtype != dtype_of(field.dtype) or tuple(out.shape) != shape or out.is_nested:
        raise InvalidRequest(
            f"field {field.name!r}: out= is {out.dtype} {[*out.shape]}, needed is "
            f"torch.{field.dtype} {[*shape]}"
        )
