"""What rows carry beside one number a token: routed experts, teacher targets, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataplane.fields import IGNORED
from trainer.materialize.columns import ALL_COLUMNS
from trainer.materialize.reading import EXPERTS, Fetched
from trainer.materialize.rows import PackRows
from trainer.materialize.spec import Experts, Teacher


def fill_experts(
    target: torch.Tensor,  # [L, layers * topk], rows of the pack in place
    used: int,
    experts: Experts,
    generator: torch.Generator | None,
) -> None:
    """Random valid ids behind the rows.

    Padding tokens are routed like others, and always to the same experts they would flood them.
    """
    if len(target) == used:
        return
    if generator is None:
        raise ValueError(f"padding is routed at random: {EXPERTS} needs a generator")
    shape = (len(target) - used, target.shape[1])
    target[used:] = torch.randint(experts.count, shape, generator=generator).to(target.dtype)


def check_experts(rows: torch.Tensor, experts: Experts, keys: Sequence[str]) -> None:
    """ValueError if rows have another width than the model or name experts that it lacks."""
    due = experts.layers * experts.topk
    if rows.ndim != 2 or rows.shape[1] != due:
        raise ValueError(
            f"{EXPERTS} of {keys[0]!r} have entries of shape {[*rows.shape[1:]]}, not [{due}] "
            f"({experts.layers} layers x {experts.topk})"
        )
    ids = rows.numpy()
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < experts.count:
        raise ValueError(
            f"{EXPERTS} of the pack of {keys[0]!r} are ids {ids.min()} to {ids.max()}, and the "
            f"model has {experts.count} experts"
        )


def place_targets(
    columns: Mapping[str, torch.Tensor],  # [L] or [L, k], filled with padding
    labels: torch.Tensor,  # [L], before staleness
    fetched: Fetched,
    rows: PackRows,
    teacher: Teacher,
) -> None:
    """Teacher targets at the ends of their rows. Entries under holes are kept.

    Raises:
        ValueError: a row has no targets or those of another kind, or a token before its targets is
            supervised; names the key.
    """
    for name, target in columns.items():
        joined = fetched.field(name)
        for place, (row, span) in zip(rows.places, rows.spans(), strict=True):
            where = None if joined is None else joined.layout.span(place)
            if joined is None or where is None:
                raise ValueError(f"key {row.key!r} has no {name}, which its teacher should give")
            given = joined.values[where[0] : where[1]]
            if tuple(given.shape[1:]) != teacher.trail:
                raise ValueError(
                    f"{name} of key {row.key!r} has entries of shape {[*given.shape[1:]]}, and a "
                    f"{teacher.kind!r} teacher gives {[*teacher.trail]}"
                )
            begin = max(span.stop - len(given), span.start)
            if bool((labels[span.start : begin] != IGNORED).any()):
                raise ValueError(
                    f"key {row.key!r}: {name} has {len(given)} entries, and tokens before them "
                    "are supervised"
                )
            mine = given[len(given) - (span.stop - begin) :]
            target[begin : span.stop] = mine.to(ALL_COLUMNS[name].dtype)


def join_multi_modal(maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The multimodal inputs of a pack: arrays joined along their first axis, the rest as a list.
    Grids become int64, whatever a processor made of them.

    Rows without any leave nothing behind: their tokens have no place for an image either.
    """
    names = dict.fromkeys(name for one in maps for name in one)
    joined: dict[str, Any] = {}
    for name in names:
        values = [one[name] for one in maps if name in one and one[name] is not None]
        if values and all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values):
            whole = torch.cat(
                [v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in values]
            )
            joined[name] = whole.to(torch.int64) if name.endswith("grid_thw") else whole
        else:
            joined[name] = values
    return joined
