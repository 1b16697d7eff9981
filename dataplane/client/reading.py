"""What a get must copy: from the tag store's answer to runs of bytes, in numpy. Pure.

Letters: N rows of the answer, B blocks, C columns, R rows of a block, F free dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.codec.template import Template
from dataplane.types import FieldSchema, Revision

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


class FieldRows(NamedTuple):
    """Where the rows of one field lie, in the order asked for."""

    name: str
    schema: FieldSchema
    block: Ints32  # [N], index into ReadPlan.block_ids
    offset: Ints  # [N], from the start of the block
    nbytes: Ints  # [N]
    shape: Ints32  # [N, rank]


class ReadPlan(NamedTuple):
    revision: Revision
    keys: list[str]
    fields: list[FieldRows]
    stores: list[str]
    block_store: Ints32  # [B], index into `stores`
    block_ids: Ints  # [B]
    block_segment: Ints  # [B]
    block_offset: Ints  # [B], from the start of the segment


class Runs(NamedTuple):
    """Neighbouring bytes, merged: what is copied in one go."""

    block: Ints32
    offset: Ints
    nbytes: Ints


@lru_cache(maxsize=4096)
def _template(blob: bytes) -> Template:
    return Template.parse(blob)


def plan_read(keys: Sequence[str], answer: list[Any]) -> ReadPlan:
    """The plan of the tag store's answer to `resolve` of these keys."""
    revision, kept, names, schemas, stores, blobs, blocks, groups = answer
    templates = [_template(blob) for blob in blobs]
    store_of = np.frombuffer(blocks[0], np.uint16).astype(np.int32)
    template_of = np.frombuffer(blocks[1], np.uint32)
    rows_of = np.frombuffer(blocks[5], np.int32)
    lengths = np.frombuffer(blocks[6], np.int32)
    where = _Blocks(templates, template_of, rows_of, lengths)
    fields: list[FieldRows | None] = [None] * len(names)
    for members, which, places in groups:
        block = np.frombuffer(which, np.int32)
        place = np.frombuffer(places, np.int32)
        for i in members:
            schema = FieldSchema(*schemas[i]) if schemas[i] else FieldSchema("object", 1, 0)
            fields[i] = where.field(names[i], schema, block, place)
    return ReadPlan(
        Revision(*revision),
        list(keys) if kept is None else kept,
        [field for field in fields if field is not None],
        stores,
        store_of,
        np.frombuffer(blocks[2], np.int64),
        np.frombuffer(blocks[3], np.uint32).astype(np.int64),
        np.frombuffer(blocks[4], np.int64),
    )


class _Blocks:
    """Layouts of all blocks of an answer: one numpy pass per template and row count."""

    def __init__(
        self,
        templates: Sequence[Template],
        template_of: npt.NDArray[np.uint32],
        rows_of: Ints32,
        lengths: Ints32,
    ) -> None:
        num_free = np.array([t.num_free for t in templates], np.int64)
        words = num_free[template_of] * rows_of if len(template_of) else np.zeros(0, np.int64)
        ends = np.cumsum(words)
        self._kinds: list[tuple[Template, Any, Any]] = []
        self._kind_of = np.zeros(len(rows_of), np.int32)
        self._place_of = np.zeros(len(rows_of), np.int32)
        kinds = template_of.astype(np.int64) << 32 | rows_of
        for number, kind in enumerate(np.unique(kinds)):
            members = np.flatnonzero(kinds == kind)
            template, rows = templates[int(kind) >> 32], int(kind) & 0xFFFFFFFF
            size = template.num_free * rows
            starts = ends[members] - size
            own = lengths[starts[:, None] + np.arange(size)]  # [B, F * R]
            sizes = own.reshape(len(members), template.num_free, rows).transpose(1, 0, 2)
            self._kinds.append((template, sizes, template.layout(sizes, rows)))
            self._kind_of[members] = number
            self._place_of[members] = np.arange(len(members))

    def field(self, name: str, schema: FieldSchema, block: Ints32, place: Ints32) -> FieldRows:
        count = len(block)
        offset = np.empty(count, np.int64)
        nbytes = np.empty(count, np.int64)
        shape = np.empty((count, schema.rank), np.int32)
        kind_of = self._kind_of[block]
        for number, (template, sizes, layout) in enumerate(self._kinds):
            if len(self._kinds) == 1:
                mine: Any = slice(None)
            else:
                mine = np.flatnonzero(kind_of == number)
                if not len(mine):
                    continue
            if not count:
                break
            column = template.index[name]
            blocks, rows = self._place_of[block[mine]], place[mine]
            offset[mine] = layout.offsets[column, blocks, rows]
            nbytes[mine] = layout.nbytes[column, blocks, rows]
            free = template.first_free[column]
            for d, size in enumerate(template.columns[column].dims):
                if size < 0:
                    shape[mine, d] = sizes[free, blocks, rows]
                    free += 1
                else:
                    shape[mine, d] = size
        return FieldRows(name, schema, block, offset, nbytes, shape)


def merge(rows: FieldRows) -> Runs:
    """The rows as runs; a batch that is read back in its own order is a single one."""
    count = len(rows.nbytes)
    if count < 2:
        return Runs(rows.block, rows.offset, rows.nbytes)
    joined = (rows.block[1:] == rows.block[:-1]) & (
        rows.offset[1:] == rows.offset[:-1] + rows.nbytes[:-1]
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    if len(starts) == count:
        return Runs(rows.block, rows.offset, rows.nbytes)
    return Runs(rows.block[starts], rows.offset[starts], np.add.reduceat(rows.nbytes, starts))
