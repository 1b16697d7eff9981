"""What a pack, or all packs of a rank, have to get, and where each row lies in what came back.

Owns the arguments of the gets. Rows come joined: cut by one entry while they are read, and where
one pack is read by itself, padded to its length and written straight into the caller's buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from trainer.materialize.columns import COLUMNS
from trainer.materialize.spec import PackSpec
from trainer.trajectory import Trajectory

if TYPE_CHECKING:
    from dataplane import Rows

MULTI_MODAL = "multi_modal_inputs"
EXPERTS = "routed_experts"
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True)
class Read:
    """One get: `client.kv_batch_get(read.keys, partition_id, **read.arguments)`."""

    keys: list[str]
    places: list[int]
    """Which of the members each key is; empty where keys are those that members share."""
    arguments: dict[str, Any]


def reads_for(
    members: Sequence[Trajectory],
    spec: PackSpec,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
    one_pack: bool = False,
) -> list[Read]:
    """The gets for these rows, few whatever their number; none for an empty pack.

    Args:
        members: rows in the order in which packs have them. Other orders work and copy more.
        one_pack: they are one pack: what is read has its length, padding included.
        into: with `one_pack`, buffers to read into (`new_buffers`), which the pack then lies over.
    """
    if not members:
        return []
    everyone = list(range(len(members)))
    columns: dict[tuple[int, ...], list[str]] = {tuple(everyone): ["input_ids", "labels"]}
    columns[tuple(everyone)] += spec.columns
    if spec.traits.has_rollout_logprobs:
        having = tuple(i for i in everyone if members[i].has_rollout_logprobs)
        columns.setdefault(having, []).append("logprobs")
    if spec.replays_experts:
        having = tuple(i for i in everyone if members[i].has_routed_experts)
        columns.setdefault(having, []).append(EXPERTS)
    reads: list[Read] = []
    for places, names in columns.items():
        if places:
            trim = {name: COLUMNS[name].trim for name in names if name in COLUMNS}
            more: dict[str, Any] = {"trim": trim} if trim else {}
            if one_pack:
                more["total"] = spec.cap
                out = {name: into[name] for name in names if name in into} if into else {}
                more |= {"out": out} if out else {}
            reads.append(_read(members, places, names, **more))
    if spec.teacher is not None:
        reads.append(_read(members, everyone, spec.teacher.columns))
    if spec.has_three_axes:
        having = [i for i in everyone if members[i].position_layout == "mrope_3d"]
        if having:
            reads.append(_read(members, having, [POSITIONS]))
    if spec.multi_modal:
        reads += _multi_modal_reads(members)
    return reads


def new_buffers(spec: PackSpec, *, pin_memory: bool = False) -> dict[str, torch.Tensor]:
    """Buffers for one pack after the other, by field. A pack lies over them: use it up first."""
    names = ["input_ids", "labels", *spec.columns]
    if spec.traits.has_rollout_logprobs:
        names.append("logprobs")
    buffers = {
        name: torch.empty(spec.cap, dtype=COLUMNS[name].dtype, pin_memory=pin_memory)
        for name in names
    }
    if spec.replays_experts and spec.experts is not None:
        shape = (spec.cap, spec.experts.layers * spec.experts.topk)
        buffers[EXPERTS] = torch.empty(shape, dtype=spec.experts.dtype, pin_memory=pin_memory)
    return buffers


def _read(
    members: Sequence[Trajectory], places: Sequence[int], names: Sequence[str], **more: Any
) -> Read:
    keys = [members[i].key for i in places]
    return Read(keys, list(places), {"select_fields": list(names), "layout": "packed", **more})


def _multi_modal_reads(members: Sequence[Trajectory]) -> list[Read]:
    arguments: dict[str, Any] = {"select_fields": [MULTI_MODAL], "layout": "list"}
    own = [i for i, row in enumerate(members) if row.has_multi_modal_inputs]
    shared = list(dict.fromkeys(row.shared for row in members if row.shared is not None))
    reads: list[Read] = []
    if own:
        reads.append(Read([members[i].key for i in own], own, arguments))
    if shared:
        reads.append(Read(shared, [], arguments))
    return reads


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of a field begin and end; fields of the same row lengths share one."""

    starts: list[int]  # [rows + 1]
    row_of: dict[int, int]
    """Which row a member has; members without one are not there."""

    def span(self, member: int) -> tuple[int, int] | None:
        """Where a member's entries are; None if it has none."""
        row = self.row_of.get(member)
        return None if row is None else (self.starts[row], self.starts[row + 1])

    def length(self, member: int) -> int:
        """Entries of a member; -1 if it has none."""
        row = self.row_of.get(member)
        return -1 if row is None else self.starts[row + 1] - self.starts[row]

    def runs(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Spans of these members in order, neighbours joined."""
        runs: list[tuple[int, int]] = []
        for member in members:
            span = self.span(member)
            if span is None:
                continue
            if runs and runs[-1][1] == span[0]:
                runs[-1] = (runs[-1][0], span[1])
            else:
                runs.append(span)
        return runs


NOTHING = Layout([0], {})


@dataclass(frozen=True, slots=True)
class Joined:
    """The rows of one field, joined along the dimension that counts tokens."""

    values: torch.Tensor
    layout: Layout


class Fetched:
    """What the reads brought, by field and member."""

    def __init__(self, answers: Sequence[tuple[Read, Rows]] = ()) -> None:
        """Takes each read with its rows. ValueError if rows are missing."""
        self._fields: dict[str, Joined] = {}
        self._own: dict[int, Mapping[str, Any]] = {}
        self._shared: dict[str, Mapping[str, Any]] = {}
        for read, rows in answers:
            if list(rows.keys) != read.keys:
                gone = sorted(set(read.keys).difference(rows.keys))
                raise ValueError(f"rows were asked for and are not here: {', '.join(gone[:5])}")
            row_of = {member: row for row, member in enumerate(read.places)}
            layouts: list[Layout] = []
            for name in read.arguments["select_fields"]:
                if name != MULTI_MODAL:
                    starts: list[int] = cast("Any", rows.cu_seqlens[name]).tolist()
                    same = [layout for layout in layouts if layout.starts == starts]
                    if not same:
                        same = [Layout(starts, row_of)]
                        layouts += same
                    self._fields[name] = Joined(rows.fields[name], same[0])
                elif read.places:
                    self._own |= dict(zip(read.places, rows.fields[name], strict=True))
                else:
                    self._shared |= dict(zip(read.keys, rows.fields[name], strict=True))

    def field(self, name: str) -> Joined | None:
        """The rows of a field; None if none was read."""
        return self._fields.get(name)

    def multi_modal(self, member: int, shared: str | None) -> dict[str, Any]:
        """What a member and the key that it shares hold; its own where both have a name."""
        found: dict[str, Any] = {}
        if shared is not None:
            found.update(self._shared.get(shared, {}))
        found.update(self._own.get(member, {}))
        return found

    def layout(self, name: str) -> Layout:
        """Where the rows of a field lie; nowhere if none was read."""
        joined = self._fields.get(name)
        return NOTHING if joined is None else joined.layout
