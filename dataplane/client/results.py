"""What gets and listings return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dataplane.errors import FieldNotFound, InternalError, InvalidRequest
from dataplane.tags.listing import FIELDS, KEYS, LENGTHS
from dataplane.types import KVBatchMeta, Revision, Tags, TagValue
from dataplane.wire import columns

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@dataclass(slots=True)
class Rows:
    """The rows that a get brought, in the order asked for."""

    keys: list[str]
    """The keys that came back."""
    fields: dict[str, Any]
    """Container of each field, in the layout asked for."""
    lengths: dict[str, torch.Tensor] = field(default_factory=dict[str, Any])
    """Length of each row along the ragged dimension, for ragged fields. # [B] int32"""
    cu_seqlens: dict[str, torch.Tensor] = field(default_factory=dict[str, Any])
    """Packed layout: where each row starts, and the end of the last. # [B + 1] int32"""
    revision: Revision | None = None
    """The revision of the partition that these rows are of."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def to_tensordict(self) -> TensorDict:
        """The same containers as a TensorDict of batch size [B].

        Lists become NonTensorStacks, or jagged tensors where they hold tensors. Packed
        containers have no batch dimension and are refused with InvalidRequest.
        """
        from dataplane.codec.containers import to_tensordict

        if self.cu_seqlens:
            raise InvalidRequest("packed fields have no batch dimension; get them as 'nested'")
        return to_tensordict(self.fields, len(self.keys))


class Listing:
    """The keys of a partition with their tags, at one revision; columns are decoded on demand."""

    def __init__(
        self,
        partition_id: str,
        revision: Revision,
        *,
        full: bool,
        cleared: list[str],
        rows: Sequence[int],
        field_sets: Sequence[Sequence[Sequence[str]]],
        pieces: dict[str, list[tuple[str, Any] | None]],
    ) -> None:
        self.partition_id = partition_id
        self.revision = revision
        """Pass it as `since` to get what changes from here on."""
        self.full = full
        """Whether all rows are here, rather than those that changed since a revision."""
        self.cleared = cleared
        """With `since`: keys that were cleared and are still gone."""
        self._rows = rows
        self._field_sets = field_sets
        self._pieces = pieces
        self._count = sum(rows)
        self._keys: list[str] | None = None
        self._tags: list[Tags] | None = None

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        what = "full" if self.full else f"changes, {len(self.cleared)} cleared"
        return f"Listing({self.partition_id!r}, {self._count} keys, {what}, {self.revision})"

    @property
    def keys(self) -> list[str]:
        """The keys."""
        if self._keys is None:
            self._keys = cast("list[str]", list(self._array(KEYS))) if self._count else []
        return self._keys

    @property
    def tag_names(self) -> list[str]:
        """Names of the tags that any of the rows has; sorted."""
        return sorted(name for name in self._pieces if name[0] > "\x01")

    @property
    def tags(self) -> list[Tags]:
        """The tags of each key, as plain dicts."""
        if self._tags is None:
            tags: list[Tags] = [{} for _ in range(self._count)]
            for name in self.tag_names:
                at = 0
                for piece, count in zip(self._pieces[name], self._rows, strict=True):
                    if piece is not None:
                        cells = columns.to_cells(*piece)
                        for row, cell in zip(tags[at : at + count], cells, strict=True):
                            if cell is not columns.ABSENT:
                                row[name] = cast("TagValue", cell)
                    at += count
            self._tags = tags
        return self._tags

    def column(self, name: str) -> npt.NDArray[Any]:
        """One tag of all keys as an array: int64, float64, bool, or objects.

        Where a row has no such tag: NaN in a float column, else None in an object column.
        FieldNotFound if no row has it.
        """
        if name[:1] <= "\x01" or name not in self._pieces:
            raise FieldNotFound(
                f"no key of this listing has a tag {name!r}; it has {self.tag_names}",
                partition_id=self.partition_id,
                fields=[name],
            )
        return self._array(name)

    def _array(self, name: str) -> npt.NDArray[Any]:
        pieces = self._pieces[name]
        kinds = {kind for piece in pieces if piece is not None for kind in piece[0]}
        if len(kinds) == 1 and None not in pieces:
            kind = kinds.pop()
            return columns.to_numpy(kind, [piece[1] for piece in pieces if piece is not None])
        cells: list[Any] = []
        for piece, count in zip(pieces, self._rows, strict=True):
            if piece is None:
                cells += [columns.ABSENT] * count
            else:
                cells += columns.to_cells(*piece)
        whole = columns.encode(cells)
        return columns.to_numpy(whole.kind, [columns.decode(whole.kind, whole.rows, whole.buffers)])

    @property
    def nbytes(self) -> int:
        """Bytes of the columns as they came."""
        parts = (piece for column in self._pieces.values() for piece in column if piece is not None)
        return sum(piece[1].nbytes for piece in parts)

    def parts(self) -> list[Listing]:
        """The same rows in order as listings of a piece each, as the store gathered them: for who
        reads a large one bit by bit. They name no cleared keys."""
        return [
            Listing(
                self.partition_id,
                self.revision,
                full=self.full,
                cleared=[],
                rows=[count],
                field_sets=[sets],
                pieces={
                    name: [pieces[i]]
                    for name, pieces in self._pieces.items()
                    if pieces[i] is not None
                },
            )
            for i, (count, sets) in enumerate(zip(self._rows, self._field_sets, strict=True))
        ]

    @property
    def ragged(self) -> list[str]:
        """Names of the fields of which `lengths` knows; sorted."""
        return sorted(name[len(LENGTHS) :] for name in self._pieces if name.startswith(LENGTHS))

    @property
    def fields(self) -> list[tuple[str, ...]]:
        """The fields that each key has; sorted."""
        out: list[tuple[str, ...]] = []
        if not self._count:
            return out
        for piece, sets in zip(self._pieces[FIELDS], self._field_sets, strict=True):
            assert piece is not None
            names = [tuple(names) for names in sets]
            out += [names[code] for code in piece[1].tolist()]
        return out

    def lengths(self, name: str) -> npt.NDArray[np.int32]:  # [B] int32
        """Length of each key's row of a ragged field, -1 where the key lacks it."""
        pieces = self._pieces.get(LENGTHS + name)
        if pieces is None:
            return np.full(self._count, -1, np.int32)
        parts = [
            np.full(count, -1, np.int32) if piece is None else piece[1]
            for piece, count in zip(pieces, self._rows, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def to_meta(self) -> KVBatchMeta:
        """The listing as a batch; `fields` are those that every key has."""
        sets = [set(names) for names in set(self.fields)]
        common = sorted(sets[0].intersection(*sets)) if sets else []
        return KVBatchMeta(self.partition_id, self.keys, self.tags, common, self.revision)


_NUMBERED = (FIELDS, LENGTHS)
"""How names of columns begin that hold bare numbers, and those alone."""


def unpack_listing(partition_id: str, body: Any, payload: memoryview) -> Listing:
    """The listing of the tag store's answer; shares memory with the payload.

    InternalError if it is none: nothing of it is believed before its sizes fit each other.
    """
    try:
        return _unpack_listing(partition_id, body, payload)
    except (InvalidRequest, TypeError, ValueError, IndexError, KeyError) as error:
        raise InternalError(f"a listing was damaged on its way: {error}") from None


def _unpack_listing(partition_id: str, body: Any, payload: memoryview) -> Listing:
    revision, full, cleared, rows, field_sets, wire_columns = body
    pieces: dict[str, list[tuple[str, Any] | None]] = {}
    sizes_of = (part[1] for _, parts in wire_columns for part in parts if part is not None)
    expected = sum(size for sizes in sizes_of for size in sizes if size > 0)
    if expected != len(payload):
        raise InternalError(
            f"a listing came with {len(payload)} bytes of columns where it says {expected}: it was "
            "damaged on its way"
        )
    at = 0
    for name, parts in wire_columns:
        if type(name) is not str or not name:
            raise TypeError("a column is named by a string")
        out: list[tuple[str, Any] | None] = []
        for part, count in zip(parts, rows, strict=True):
            if part is None:
                out.append(None)
                continue
            kind, sizes = part
            if (kind == "n") is not name.startswith(_NUMBERED):
                raise ValueError(f"a column {name!r:.80} of kind {kind!r:.80}")
            buffers: list[memoryview | None] = []
            for size in sizes:
                buffers.append(None if size < 0 else payload[at : at + size])
                at += max(size, 0)
            if kind == "n":
                numbers = np.frombuffer(buffers[1] or b"", np.int32)
                if len(numbers) != count:
                    raise ValueError(f"{len(numbers)} numbers for {count} rows")
                out.append((kind, numbers))
            else:
                out.append((kind, columns.decode(kind, count, buffers)))
        pieces[name] = out
    if not isinstance(cleared, list):
        raise TypeError("cleared keys are a list")
    gone = cast("list[str]", cleared)
    if any(rows):
        _check_own(rows, field_sets, pieces)
    return Listing(
        partition_id,
        Revision(*revision),
        full=full,
        cleared=gone,
        rows=rows,
        field_sets=field_sets,
        pieces=pieces,
    )


def _check_own(
    rows: Sequence[int],
    field_sets: Sequence[Sequence[Sequence[str]]],
    pieces: Mapping[str, Sequence[tuple[str, Any] | None]],
) -> None:
    """Every row has a key, and fields that are among those of its piece."""
    for key, fields, count, sets in zip(
        pieces[KEYS], pieces[FIELDS], rows, field_sets, strict=True
    ):
        if key is None or fields is None or (key[0], fields[0]) != ("s", "n") or key[1].null_count:
            raise ValueError("some rows have no key, or no fields")
        if count and not 0 <= int(fields[1].min()) <= int(fields[1].max()) < len(sets):
            raise ValueError("some rows have fields that are not named")
        if any(type(name) is not str for names in sets for name in names):
            raise TypeError("a field's name is a string")
