"""The layers of a row: one for each put whose fields it still has. Pure.

Owns when a cell is live, and with it the count of live cells of a placement. Never touches rows or
partitions: new layers and the bytes that died are handed back.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from dataplane.tags.placement import Placement

Layers = tuple[Any, ...]
"""Where a row's fields are: Placement, row in it (int), Placement, row in it, ... newest first.
Flat rather than pairs, which would be one more object for each of millions of rows; what is taken
out of it is annotated on the spot.

A field lies in the first layer whose template has it; the same field in later layers is dead.
"""


def cover(layers: Layers, new: Placement, at: int, dead: list[Placement]) -> tuple[Layers, int]:
    """The layers under a new one, and the bytes of the cells that it covers and that so die."""
    kept: list[Placement | int] = [new, at]
    covered = set[str]()
    nbytes = 0
    arriving = new.template.index
    for k in range(0, len(layers), 2):
        old: Placement = layers[k]
        row: int = layers[k + 1]
        left = False
        for name in old.template.names:
            if name in covered:
                continue
            if name in arriving:
                old.live -= 1
                nbytes += old.field_bytes(name, row)
            else:
                left = True
        covered.update(old.template.names)
        if left:
            kept += (old, row)
        if not old.live:
            dead.append(old)
    return tuple(kept), nbytes


def release(layers: Layers, dead: list[Placement]) -> int:
    """Let go of every live cell of a row; their bytes."""
    covered = set[str]()
    nbytes = 0
    for k in range(0, len(layers), 2):
        placement: Placement = layers[k]
        row: int = layers[k + 1]
        for name in placement.template.names:
            if name not in covered:
                placement.live -= 1
                nbytes += placement.field_bytes(name, row)
        covered.update(placement.template.names)
        if not placement.live:
            dead.append(placement)
    return nbytes


def release_whole(taken: dict[Placement, list[int]], dead: list[Placement]) -> int:
    """Let go of all cells of these rows of placements, each of which is live; their bytes."""
    nbytes = 0
    for placement, rows in taken.items():
        placement.live -= len(rows) * len(placement.template.columns)
        if len(rows) == placement.rows:
            nbytes += placement.payload_bytes
        else:
            nbytes += int(placement.cell_bytes[:, rows].sum())
        if not placement.live:
            dead.append(placement)
    return nbytes


def without(layers: Layers, gone: Container[Placement]) -> tuple[Layers, frozenset[str], int]:
    """The layers that are left when blocks are lost, the fields that were live in those, and how
    many bytes of live cells fewer there are.

    What a lost layer covered counts as live again: it is released with its row. Nobody may be
    given it, for it was overwritten; that is seen from the fields that are lost.
    """
    if len(layers) == 2 and layers[0] in gone:
        only: Placement = layers[0]
        only.live -= len(only.template.columns)
        return (), only.template.name_set, only.row_bytes(layers[1])
    left: list[Placement | int] = []
    lost = set[str]()
    before = set[str]()
    after = set[str]()
    nbytes = 0
    for k in range(0, len(layers), 2):
        placement: Placement = layers[k]
        row: int = layers[k + 1]
        names = placement.template.names
        if placement in gone:
            for name in names:
                if name not in before:
                    lost.add(name)
                    placement.live -= 1
                    nbytes += placement.field_bytes(name, row)
        else:
            left += (placement, row)
            for name in names:
                if name in before and name not in after:
                    placement.live += 1
                    nbytes -= placement.field_bytes(name, row)
            after.update(names)
        before.update(names)
    return tuple(left), frozenset(lost), nbytes


def has_layer(layers: Layers, placement: Placement, row: int) -> bool:
    """Whether a row has cells in this row of a placement."""
    return _layer_of(layers, placement, row) >= 0


def live_fields(layers: Layers, placement: Placement, row: int) -> frozenset[str]:
    """The fields whose live cell is in this row of a placement."""
    k = _layer_of(layers, placement, row)
    if k < 0:
        return frozenset()
    live = set(placement.template.names)
    for newer in range(0, k, 2):
        live -= set(layers[newer].template.names)
    return frozenset(live)


def moved(layers: Layers, old: Placement, row: int, new: Placement, at: int) -> Layers:
    """The layers with one of them in its copy."""
    k = _layer_of(layers, old, row)
    return (*layers[:k], new, at, *layers[k + 2 :])


def _layer_of(layers: Layers, placement: Placement, row: int) -> int:
    for k in range(0, len(layers), 2):
        if layers[k] is placement and layers[k + 1] == row:
            return k
    return -1
