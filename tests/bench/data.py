"""The rows that are measured, made from fixed seeds, so every process makes the same ones.

Nothing here is timed. A `Batch` is what a put gets and what a get is compared with: the
comparison is of bits, row by row, in whatever key order the reader asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

Tags = dict[str, object]
Row = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Columns:
    """One field of many rows: the rows' values back to back, and the length of each."""

    values: torch.Tensor  # [sum(lengths)]
    lengths: torch.Tensor  # [B] int64

    def rows(self) -> tuple[torch.Tensor, ...]:
        """The values of each row, as views."""
        return torch.split(self.values, self.lengths.tolist())

    def same_as(self, other: Columns) -> bool:
        """Whether both hold the same rows, bit for bit."""
        if self.values.dtype != other.values.dtype or not torch.equal(self.lengths, other.lengths):
            return False
        # Compared as integers: a NaN must equal itself, and 0.0 must not equal -0.0.
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = integer[self.values.element_size()]
        return torch.equal(self.values.view(kind), other.values.view(kind))

    def picked(self, order: Sequence[int]) -> Columns:
        """These rows of it, in this order."""
        rows = self.rows()
        return Columns(torch.cat([rows[i] for i in order]), self.lengths[list(order)])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one put: keys, fields as columns, and tags (none for a put of values only)."""

    keys: list[str]
    columns: dict[str, Columns]
    tags: list[Tags] | None
    fields: TensorDict
    """The same columns in the container that trainers hold: dense, or jagged where ragged."""

    @property
    def nbytes(self) -> int:
        """Bytes of values."""
        return sum(c.values.numel() * c.values.element_size() for c in self.columns.values())

    def stamp(self, number: int) -> None:
        """Write `number` into the first element of every row.

        Each round puts other bits under other keys, so that a result left over from an
        earlier round cannot pass for this one's.
        """
        for column in self.columns.values():
            starts = torch.cumsum(column.lengths, 0) - column.lengths
            column.values[starts[column.lengths > 0]] = number

    def row(self, index: int) -> Row:
        """The fields of one row, as a put of a single key takes them."""
        return {name: column.rows()[index] for name, column in self.columns.items()}


def keys_of(count: int, name: str) -> list[str]:
    """Keys as agent loops make them: `{uid}_{session_id}_{index}`, eight sessions a prompt."""
    return [f"{name}-{i // 8:06d}_{i % 8}_0" for i in range(count)]


def tags_of(keys: Sequence[str], lengths: Sequence[int], seed: int) -> list[Tags]:
    """Eight tags a trajectory, of the kinds that trainers select by."""
    rng = np.random.default_rng(seed)
    scores = rng.random(len(keys)).round(4).tolist()
    return [
        {
            "uid": key.split("_")[0],
            "session_id": i % 8,
            "index": 0,
            "status": "completed",
            "prompt_len": min(int(length), 128),
            "seq_len": int(length),
            "global_steps": i // 4096,
            "score": score,
        }
        for i, (key, length, score) in enumerate(zip(keys, lengths, scores, strict=True))
    ]


def dense(rows: int, fields: int, width: int, seed: int = 1) -> Batch:
    """`rows` x `fields` x `width` float32, one dense tensor a field."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((rows,), width, dtype=torch.int64)
    tensors = {
        f"field_{i}": torch.rand((rows, width), generator=generator, dtype=torch.float32)
        for i in range(fields)
    }
    columns = {name: Columns(t.view(-1), lengths) for name, t in tensors.items()}
    return Batch(keys_of(rows, "dense"), columns, None, TensorDict(tensors, batch_size=[rows]))


def long_tailed(rows: int, mean: int, seed: int) -> list[int]:
    """Response lengths as rollouts have them: most short, some near the limit of 4096."""
    rng = np.random.default_rng(seed)
    sigma = 0.8
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    # The clipping moves the mean; one rescaling brings it back to within a few per cent.
    clipped = np.clip(drawn, 64, 4096)
    return np.clip(clipped * (mean / clipped.mean()), 64, 4096).astype(int).tolist()


RAGGED_FIELDS: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "advantages": torch.float32,
}
TRAJECTORY_FIELDS = ("input_ids", "labels", "logprobs", "advantages")


def ragged(
    keys: list[str],
    lengths: list[int],
    names: Sequence[str] = tuple(RAGGED_FIELDS),
    seed: int = 2,
) -> Batch:
    """Rows of those lengths: token ids, labels and per-token floats, all equally long."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    columns: dict[str, Columns] = {}
    for name in names:
        if RAGGED_FIELDS[name] == torch.int64:
            values = torch.randint(0, 150_000, (total,), generator=generator)
        else:
            values = torch.randn(total, generator=generator)
        columns[name] = Columns(values, counts)
    fields = TensorDict(
        {
            name: torch.nested.nested_tensor_from_jagged(column.values, offsets)
            for name, column in columns.items()
        },
        batch_size=[len(keys)],
    )
    return Batch(keys, columns, tags_of(keys, lengths, seed), fields)
