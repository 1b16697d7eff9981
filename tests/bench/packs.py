"""The workload of training workers: the rows of two ranks, fetched and made into packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from tests.bench import data
from tests.bench.rows import BatchWorkload
from tests.bench.subjects import Dataplane, Subject
from tests.bench.workload import Cast, Line, timed
from trainer.materialize import Fetched, PackMemory, PackSpec, pack_plan, reads_for
from trainer.plan import PlanConfig, make_plan
from trainer.trajectory import BatchTraits, Trajectory

CAP = 8192
RANKS = 2
PADDING = {"labels": -100}
"""What pads a field; 0 the others."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One pack as every system has it in the end."""

    columns: dict[str, torch.Tensor]  # [CAP] each
    positions: torch.Tensor  # [CAP]
    cu_seq_lens: torch.Tensor  # [S + 1] int32

    def same_as(self, other: Packed) -> bool:
        mine = {**self.columns, "positions": self.positions, "cu": self.cu_seq_lens}
        theirs = {**other.columns, "positions": other.positions, "cu": other.cu_seq_lens}
        return set(mine) == set(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)


class FetchAndPack(BatchWorkload):
    name = "packs"
    subjects = ("ours", "embedded", "transferqueue")
    lines = (
        Line(
            "fetch_pack",
            "ms",
            "get 1,024 trajectories (mean 1.1k tokens, 6 fields) for 2 ranks, as packs of 8192",
            10,
        ),
    )

    def load(self) -> None:
        rows, mean = self.scale.ragged
        lengths = data.long_tailed(rows, mean, seed=3)
        self.batch = data.ragged(data.keys_of(rows, "packs"), lengths)
        self.members = [
            _member(key, length) for key, length in zip(self.batch.keys, lengths, strict=True)
        ]
        config = PlanConfig(cap=CAP, strategy="cost")
        trained = [row.train_len for row in self.members]
        plan = make_plan(trained, config, RANKS, keys=self.batch.keys)
        self.parts = [plan.for_rank(rank).in_pack_order() for rank in range(RANKS)]
        self.spec = PackSpec(
            cap=CAP,
            traits=BatchTraits.of(self.members),
            columns=("old_logprobs", "ref_logprobs", "advantages"),
        )
        self.memories = [PackMemory() for _ in self.parts]

    def fetch_pack(self, subject: Subject, number: int) -> float:
        """Seconds until both ranks have their packs, one after the other."""
        self.got: Any = None
        one = self._ours if isinstance(subject, Dataplane) else self._padded
        seconds, self.got = timed(lambda: [one(subject, rank) for rank in range(RANKS)])
        return seconds

    def _ours(self, subject: Dataplane, rank: int) -> Any:
        part = self.parts[rank]
        members = part.take(self.members)
        reads = reads_for(members, self.spec)
        get = subject.client.kv_batch_get
        fetched = Fetched([(r, get(r.keys, self.partition, **r.arguments)) for r in reads])
        return pack_plan(part, members, fetched, self.spec, memory=self.memories[rank])

    def _padded(self, subject: Subject, rank: int) -> list[Packed]:
        part = self.parts[rank]
        got = subject.get(part.take(self.batch.keys), self.partition, list(self.batch.columns))
        fields = {name: got[name] for name in self.batch.columns}
        return pad_then_pack(fields, [pack for step in part.packs for pack in step])

    def check_packs(self, subject: Subject, number: int) -> None:
        """Every pack is what its rows are, shifted and joined, bit for bit."""
        self.batch.stamp(number)
        rows = {name: column.rows() for name, column in self.batch.columns.items()}
        for part, found in zip(self.parts, self.got, strict=True):
            places = [[part.indices[i] for i in pack] for step in part.packs for pack in step]
            packs = found if isinstance(found[0], Packed) else _flat(found)
            for which, pack in zip(places, packs, strict=True):
                due = _pack({name: [of[i] for i in which] for name, of in rows.items()})
                if not pack.same_as(due):
                    raise AssertionError(f"{subject.name} {self.name}: a pack is different")

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        cast.writer("put", number=number)
        found = {"fetch_pack": cast.reader("fetch_pack", number=number)}
        cast.reader("check_packs", number=number)
        cast.writer("clear")
        return found


def pad_then_pack(
    fields: Mapping[str, torch.Tensor], packs: Sequence[Sequence[int]]
) -> list[Packed]:
    """Packs of a jagged batch, made as trainers do it that have no other way: padded, then cut."""
    lengths = fields["input_ids"].offsets().diff().tolist()
    dense = {
        name: torch.nested.to_padded_tensor(field, PADDING.get(name, 0))
        for name, field in fields.items()
    }
    return [
        _pack({name: [table[i, : lengths[i]] for i in pack] for name, table in dense.items()})
        for pack in packs
    ]


def _pack(rows: Mapping[str, Sequence[torch.Tensor]]) -> Packed:
    """One pack of whole rows: inputs lose their last entry, all else its first."""
    sizes = [len(row) - 1 for row in rows["input_ids"]]
    rest = CAP - sum(sizes)
    columns: dict[str, torch.Tensor] = {}
    for name, column in rows.items():
        cut = [row[:-1] if name == "input_ids" else row[1:] for row in column]
        columns[name] = pad(torch.cat(cut), (0, rest), value=PADDING.get(name, 0))
    sizes += [min(1024, rest - at) for at in range(0, rest, 1024)]
    return Packed(
        columns,
        torch.cat([torch.arange(size) for size in sizes]),
        torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
    )


def _flat(steps: Any) -> list[Packed]:
    """Our packs as the others have them."""
    return [
        Packed(
            {
                "input_ids": pack.input_ids[0],
                "labels": pack.labels[0],
                **{name: column[0] for name, column in pack.columns.items()},
            },
            pack.position_ids[0],
            pack.cu_seq_lens,
        )
        for step in steps
        for pack in step
    ]


def _member(key: str, length: int) -> Trajectory:
    prompt = min(length - 1, 128)
    its = {
        "uid": key.split("_")[0],
        "session_id": 0,
        "index": 0,
        "status": "completed",
        "prompt_len": prompt,
        "response_len": length - prompt,
        "seq_len": length,
        "policy_len": length - prompt,
    }
    return Trajectory.of(key, its, ("logprobs",))
