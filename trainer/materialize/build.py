"""Packs made of fetched rows: one way for full packs, packs with padding, and empty ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from trainer.materialize.attached import (
    check_experts,
    fill_experts,
    join_multi_modal,
    place_targets,
)
from trainer.materialize.columns import ALL_COLUMNS, COLUMNS, TEACHER_INDICES
from trainer.materialize.filling import clear_unsupervised, fill_runs, numbers_of, spread
from trainer.materialize.freshness import drop_stale
from trainer.materialize.memory import PackMemory
from trainer.materialize.pack import PackTensors
from trainer.materialize.positions import padding_chunks, restarting, three_axes
from trainer.materialize.reading import EXPERTS, POSITIONS, Fetched
from trainer.materialize.rows import PackRows
from trainer.materialize.spec import PackSpec
from trainer.plan.types import RankPlan
from trainer.trajectory import Trajectory


def pack_plan(
    part: RankPlan,
    members: Sequence[Trajectory],
    fetched: Fetched,
    spec: PackSpec,
    *,
    advantages: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    teachers: Sequence[int] | None = None,
    memory: PackMemory | None = None,
) -> list[list[PackTensors]]:  # [optimizer_step][pack]
    """All packs of a rank, of rows that were fetched together. For arguments see `pack_rows`.

    Args:
        memory: what the packs are to lie in, and those of the last plan lay in.
    """
    given = _Given(members, fetched, spec, advantages, generator, teachers)
    packs = iter(_build(given, [pack for step in part.packs for pack in step], memory))
    return [[next(packs) for _ in step] for step in part.packs]


def pack_rows(
    members: Sequence[Trajectory],
    fetched: Fetched,
    spec: PackSpec,
    *,
    places: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    teachers: Sequence[int] | None = None,
) -> PackTensors:
    """One pack, exactly `spec.cap` long; of no rows it is all padding.

    Args:
        members: the rows that were fetched, in the order given to `reads_for`.
        places: which of them the pack joins; all if not given.
        advantages: one number a member, for the entries that it supervises. Not where packs have
            them as a column.
        generator: draws the experts of padding tokens; needed where experts are replayed.
        teachers: index of each member's teacher, where teachers run in the training worker.

    Raises:
        ValueError: rows do not fit each other, their tags or the pack; names the key.
    """
    chosen = list(range(len(members))) if places is None else list(places)
    given = _Given(members, fetched, spec, advantages, generator, teachers)
    (pack,) = _build(given, [chosen])
    return pack


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of the caller."""

    members: Sequence[Trajectory]
    fetched: Fetched
    spec: PackSpec
    advantages: Sequence[float] | None
    generator: torch.Generator | None
    teachers: Sequence[int] | None


def _build(
    given: _Given, packs: list[list[int]], memory: PackMemory | None = None
) -> list[PackTensors]:
    """All packs together, column by column."""
    if not packs:
        return []
    work = _Work(given, packs, memory or PackMemory())
    columns = work.columns()
    routed = work.experts()
    positions = list(work.positions())
    parts = {name: torch.split(matrix, 1) for name, matrix in columns.items()}
    built: list[PackTensors] = []
    for at, (rows, sequences) in enumerate(zip(work.packs, work.sequences, strict=True)):
        mine = {name: part[at] for name, part in parts.items()}
        built.append(
            PackTensors(
                input_ids=mine.pop("input_ids"),
                labels=mine.pop("labels"),
                position_ids=positions[at],
                cu_seq_lens=torch.tensor([0, *accumulate(sequences)], dtype=torch.int32),
                max_length=max(sequences),
                num_padding=given.spec.cap - rows.used,
                columns=mine,
                routed_experts=None if routed is None else routed[at],
                multi_modal=work.multi_modal(rows),
                keys=rows.keys,
                lengths=rows.lengths,
            )
        )
    return built


class _Work:
    """The columns of all packs. # a matrix is [packs, cap] or [packs, cap, k]"""

    def __init__(self, given: _Given, packs: list[list[int]], memory: PackMemory) -> None:
        self._given = given
        self._spec = given.spec
        self._fetched = given.fetched
        self._memory = memory
        cap = given.spec.cap
        self.packs = [PackRows.of(given.members, places, given.fetched, cap) for places in packs]
        self.sequences = [[*rows.lengths, *padding_chunks(cap - rows.used)] for rows in self.packs]

    def columns(self) -> dict[str, torch.Tensor]:
        """Every column, stale tokens already without a label."""
        spec = self._spec
        columns = {name: self._column(name) for name in ("input_ids", "labels")}
        labels = columns["labels"]
        columns |= {name: self._column(name) for name in spec.template if name in COLUMNS}
        if spec.teacher is not None:
            targets = {n: self._padding(n, spec.teacher.trail) for n in spec.teacher.columns}
            for at, rows in enumerate(self.packs):
                mine = {name: matrix[at] for name, matrix in targets.items()}
                place_targets(mine, labels[at], self._fetched, rows, spec.teacher)
            columns |= targets
        if spec.fresh is not None:
            for at, rows in enumerate(self.packs):
                for row, span in rows.spans():
                    drop_stale(labels[at][span], row, spec.fresh)
        if "advantages" in spec.columns:
            columns["advantages"] = self._column("advantages")
            clear_unsupervised(columns["advantages"], labels, 0.0)
        else:
            columns["advantages"] = self._spread("advantages", self._given.advantages, labels)
        if spec.train_teachers:
            name = TEACHER_INDICES.name
            columns[name] = self._spread(name, self._given.teachers, labels)
        return columns

    def experts(self) -> torch.Tensor | None:  # [packs, cap, layers, topk]
        """The experts of rows as they were, and of padding at random."""
        experts = self._spec.experts
        if experts is None or not self._spec.replays_experts:
            return None
        joined = self._fetched.field(EXPERTS)
        width = experts.layers * experts.topk
        matrix = self._take(EXPERTS, experts.dtype, (width,))
        for at, rows in enumerate(self.packs):
            runs = rows.runs(EXPERTS, self._fetched)
            if joined is not None and runs:
                for start, end in runs:
                    check_experts(joined.values[start:end], experts, rows.keys)
                if rows.is_alone(joined, runs, matrix):
                    matrix = joined.values[None]
                else:
                    fill_runs(matrix[at : at + 1], joined.values, [runs], 0)
            used = rows.used if runs else 0
            fill_experts(matrix[at], used, experts, self._given.generator)
        return matrix.view(*matrix.shape[:2], experts.layers, experts.topk)

    def positions(self) -> Iterator[torch.Tensor]:  # [1, cap] or [3, 1, cap], a pack
        """Positions of rows and padding."""
        if not self._spec.has_three_axes:
            matrix = self._take(POSITIONS, torch.int64)
            everything = [length for pack in self.sequences for length in pack]
            restarting(everything, out=matrix.view(-1))
            yield from torch.split(matrix, 1)
            return
        joined = self._fetched.field(POSITIONS)
        for rows, sequences in zip(self.packs, self.sequences, strict=True):
            given: list[torch.Tensor | None] = [None] * len(sequences)
            for at, (place, row) in enumerate(zip(rows.places, rows.members, strict=True)):
                span = None if joined is None else joined.layout.span(place)
                if joined is not None and span is not None:
                    given[at] = joined.values[:, span[0] : span[1]]
                elif row.position_layout == "mrope_3d":
                    raise ValueError(
                        f"key {row.key!r} has no {POSITIONS}, and its tag says mrope_3d"
                    )
            padding = [""] * (len(sequences) - len(rows.keys))
            yield three_axes(given, sequences, [*rows.keys, *padding])

    def multi_modal(self, rows: PackRows) -> Mapping[str, object]:
        """The multimodal inputs of one pack."""
        if not self._spec.multi_modal:
            return {}
        found = [
            self._fetched.multi_modal(place, row.shared)
            for place, row in zip(rows.places, rows.members, strict=True)
        ]
        return join_multi_modal(found)

    def _column(self, name: str) -> torch.Tensor:
        """Rows, then padding; padding alone in packs whose rows do not have it."""
        runs = [rows.runs(name, self._fetched) for rows in self.packs]
        joined = self._fetched.field(name)
        if joined is None:
            return self._padding(name)
        column = ALL_COLUMNS[name]
        matrix = self._take(name, column.dtype)
        if self.packs[0].is_alone(joined, runs[0], matrix):
            return joined.values[None]
        fill_runs(matrix, joined.values, runs, column.pad)
        return matrix

    def _padding(self, name: str, trail: Sequence[int] = ()) -> torch.Tensor:
        column = ALL_COLUMNS[name]
        return self._take(name, column.dtype, trail).fill_(column.pad)

    def _spread(
        self, name: str, given: Sequence[float] | None, labels: torch.Tensor
    ) -> torch.Tensor:
        """A number a row on the entries that the row supervises."""
        column = ALL_COLUMNS[name]
        matrix = self._take(name, column.dtype)
        numbers = [numbers_of(name, given, self._given.members, r.places) for r in self.packs]
        spread(matrix, numbers, self.sequences)
        clear_unsupervised(matrix, labels, column.pad)
        return matrix

    def _take(self, name: str, dtype: torch.dtype, trail: Sequence[int] = ()) -> torch.Tensor:
        return self._memory.take(name, len(self.packs), self._spec.cap, dtype, trail)
