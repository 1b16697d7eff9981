"""Whether a checkpoint is what was saved: every byte by its checksum, every file by what it holds.

Needs no plane. A checkpoint is loaded only after it has passed here.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dataplane.checkpoint.files import OpenedFile
from dataplane.checkpoint.load import Checkpoint
from dataplane.checkpoint.manifest import Manifest, PartitionEntry
from dataplane.errors import quote


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check a checkpoint from end to end; a summary of it.

    Raises:
        CheckpointDamaged: naming the file that is not as it was saved, and where in it if that is
            known.
        InvalidRequest: there is none at this path, or it is of a version that is not known here.
    """
    started = time.monotonic()
    with Checkpoint(path) as checkpoint:
        for _ in check(checkpoint):
            pass
        return {**checkpoint.summary(), "seconds": time.monotonic() - started}


def check(checkpoint: Checkpoint) -> Iterator[None]:
    """The same of an opened one, in steps."""
    manifest = checkpoint.manifest
    for entry in manifest.files():
        yield from checkpoint.file(entry).check_sum()
    for partition in manifest.partitions:
        yield from _check_tags(checkpoint.file(partition.tags), manifest)
        for entry in partition.values:
            yield from _check_values(checkpoint.file(entry), partition)


def _check_tags(file: OpenedFile, manifest: Manifest) -> Iterator[None]:
    digests: list[bytes] = []
    for rows in file.tags():
        digests += [hashlib.blake2b(key.encode(), digest_size=16).digest() for key in rows.keys]
        for numbers in (rows.revisions, rows.cleared_at, rows.attempts):
            if numbers.max(initial=0) > manifest.n:
                raise file.damaged(f"a row is later than the revision {manifest.n} of it all")
        yield
    row = _first_again(digests)
    if row is None:
        return
    for rows in file.tags():
        if row < len(rows.keys):
            raise file.damaged(f"key {quote([rows.keys[row]])} is there twice")
        row -= len(rows.keys)


def _first_again(digests: list[bytes]) -> int | None:
    """The number of a digest that was there before; None if all differ."""
    numbers = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    order = np.lexsort((numbers[:, 1], numbers[:, 0]))
    ordered = numbers[order]
    same = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1))
    return int(max(order[same[0]], order[same[0] + 1])) if len(same) else None


def _check_values(file: OpenedFile, partition: PartitionEntry) -> Iterator[None]:
    for cells, _ in file.batches():
        for of in cells:
            field = partition.fields.get(of.column.name)
            if field is None or (
                (field.dtype, field.rank) != (of.column.dtype, of.column.rank)
                and not partition.open_schema
            ):
                raise file.damaged(f"field {of.column.name!r} is not as the manifest has it")
        yield
