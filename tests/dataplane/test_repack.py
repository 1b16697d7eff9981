"""Repacks: the copies make a block that holds what was kept, bit for bit, and nothing else."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.tags.placement import Placement
from dataplane.values.repack import plan_repack
from tests.dataplane.audit import COLUMNS, FREE, Blocks, cell_size
from tests.dataplane.test_resolve import cell_offset


def random_block(r: random.Random, fields: list[str], rows: int) -> Placement:
    lengths = {
        name: [
            r.randint(0, 5) if FREE[name] == 1 else [r.randint(0, 5) for _ in range(FREE[name])]
            for _ in range(rows)
        ]
        if FREE[name]
        else []
        for name in fields
    }
    return Blocks().block(rows, lengths)


def filled(block: Placement, r: random.Random) -> tuple[bytes, dict[tuple[str, int], bytes]]:
    """Bytes of a whole block as a writer makes it, and those of each cell."""
    memory = bytearray(block.nbytes)
    front = block.template.front(block.lengths, block.rows)
    memory[: len(front)] = front
    cells: dict[tuple[str, int], bytes] = {}
    for name in block.template.names:
        for row in range(block.rows):
            data = r.randbytes(cell_size(block, name, row))
            at = cell_offset(block, name, row)
            memory[at : at + len(data)] = data
            cells[name, row] = data
    return bytes(memory), cells


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=6, unique=True),
    st.integers(1, 8),
    st.data(),
)
def test_what_is_kept_is_the_same_bit_for_bit(
    fields: list[str], rows: int, data: st.DataObject
) -> None:
    r = data.draw(st.randoms(use_true_random=False))
    keep_rows = data.draw(
        st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True).map(sorted)
    )
    keep = data.draw(st.lists(st.sampled_from(fields), min_size=1, unique=True))
    old = random_block(r, fields, rows)
    memory, cells = filled(old, r)

    plan = plan_repack(old.template, old.rows, old.lengths, keep_rows, keep)

    assert plan.rows == len(keep_rows)
    assert plan.template.names == tuple(name for name in fields if name in keep)
    assert plan.nbytes == plan.template.block_bytes(plan.lengths, plan.rows)
    target = bytearray(plan.nbytes)
    front = plan.template.front(plan.lengths, plan.rows)
    target[: len(front)] = front
    for at, to, nbytes in plan.copies:
        target[to : to + nbytes] = memory[at : at + nbytes]
    new = Placement("v0", 2, 1, 0, plan.nbytes, plan.template, plan.rows, plan.lengths)
    for name in keep:
        for number, row in enumerate(keep_rows):
            at = cell_offset(new, name, number)
            nbytes = cell_size(new, name, number)
            assert nbytes == cell_size(old, name, row)
            assert bytes(target[at : at + nbytes]) == cells[name, row]
    assert new.payload_bytes == sum(cell_size(old, name, row) for name in keep for row in keep_rows)


def test_copies_stay_inside_both_blocks_and_never_overlap() -> None:
    r = random.Random(1)
    old = random_block(r, ["x", "m", "w", "s"], 20)
    plan = plan_repack(old.template, old.rows, old.lengths, [3, 4, 17], ["m", "x", "s"])
    spans = sorted((to, to + n) for _, to, n in plan.copies)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] >= plan.template.front_bytes(3)
    assert max(end for _, end in spans) <= plan.nbytes
    assert max(at + n for at, _, n in plan.copies) <= old.nbytes
    assert len(plan.copies) == 9


@pytest.mark.parametrize("fields", [["x"], ["s"], ["x", "s"], sorted(COLUMNS)], ids=str)
def test_keeping_everything_gives_the_same_block(fields: list[str]) -> None:
    old = random_block(random.Random(2), fields, 7)
    plan = plan_repack(old.template, old.rows, old.lengths, range(7), fields)
    assert plan.template.blob == old.template.blob
    assert (plan.lengths, plan.nbytes) == (old.lengths, old.nbytes)
    assert all(at == to for at, to, _ in plan.copies)


def test_a_block_of_one_row_out_of_many_is_small() -> None:
    rows = 1000
    old = Blocks().block(rows, {"x": [1000] * rows, "s": []})
    plan = plan_repack(old.template, rows, old.lengths, [999], ["x", "s"])
    assert plan.nbytes < 8200
    assert np.frombuffer(plan.lengths, np.int32).tolist() == [1000]
