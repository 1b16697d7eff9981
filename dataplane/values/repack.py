"""What to keep of a mostly dead block: copies that make a small block of its live rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataplane.codec.template import Template


class Repack(NamedTuple):
    """A new block, and where its bytes come from."""

    template: Template
    rows: int
    lengths: bytes
    nbytes: int
    copies: list[tuple[int, int, int]]
    """(offset in the old block, offset in the new one, bytes) of every cell."""


def plan_repack(
    template: Template, rows: int, lengths: bytes, keep_rows: Sequence[int], keep: Sequence[str]
) -> Repack:
    """The block of these rows and fields of an old one, in the same order."""
    old = np.frombuffer(lengths, np.int32).reshape(template.num_free, 1, rows)
    chosen = [i for i, name in enumerate(template.names) if name in set(keep)]
    free = [
        f
        for i in chosen
        for f in range(
            template.first_free[i], template.first_free[i] + len(template.columns[i].free)
        )
    ]
    new_lengths = np.ascontiguousarray(old[free][:, :, list(keep_rows)])
    new_template = Template(tuple(template.columns[i] for i in chosen))
    before = template.layout(old, rows)
    after = new_template.layout(new_lengths, len(keep_rows))
    copies = [
        (
            int(before.offsets[i, 0, row]),
            int(after.offsets[c, 0, at]),
            int(before.nbytes[i, 0, row]),
        )
        for c, i in enumerate(chosen)
        for at, row in enumerate(keep_rows)
    ]
    return Repack(new_template, len(keep_rows), new_lengths.tobytes(), int(after.total[0]), copies)
