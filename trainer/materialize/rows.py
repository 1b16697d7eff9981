"""The rows of one pack, and where their values lie in what was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trainer.materialize.reading import Fetched, Joined, Layout
from trainer.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class PackRows:
    """Rows whose lengths are what their tags say."""

    places: list[int]
    """Which of the members they are."""
    members: list[Trajectory]
    keys: list[str]
    lengths: list[int]
    """T of each."""
    used: int
    """Their entries together."""
    _runs: dict[Layout, list[tuple[int, int]]] = field(
        default_factory=dict[Layout, list[tuple[int, int]]]
    )
    """Of fields that were found to fit."""

    @classmethod
    def of(
        cls, members: Sequence[Trajectory], places: Sequence[int], fetched: Fetched, cap: int
    ) -> PackRows:
        """These of the members. ValueError, naming the key, if one was not fetched or is not as
        long as its tags say, or if they are longer than the pack together."""
        rows = [members[place] for place in places]
        layout = fetched.layout("input_ids")
        lengths = [layout.length(place) for place in places]
        for row, length in zip(rows, lengths, strict=True):
            if length < 0:
                raise ValueError(f"key {row.key!r} is in this pack and was not fetched")
            if length != row.train_len or length < 1:
                raise ValueError(
                    f"key {row.key!r} has {length + 1} tokens, and its tag seq_len says "
                    f"{row.seq_len}; a row that is trained has two at least"
                )
        keys = [row.key for row in rows]
        used = sum(lengths)
        if used > cap:
            raise ValueError(
                f"the rows {', '.join(keys[:5])} have {used} entries, and a pack holds {cap}"
            )
        found = cls(list(places), rows, keys, lengths, used)
        found._runs[layout] = layout.runs(places)  # most fields have rows of these lengths
        return found

    def spans(self) -> Iterator[tuple[Trajectory, slice]]:
        """Each row, and where it is in the pack."""
        at = 0
        for row, length in zip(self.members, self.lengths, strict=True):
            yield row, slice(at, at + length)
            at += length

    def runs(self, name: str, fetched: Fetched) -> list[tuple[int, int]]:
        """Where the rows lie in a field, neighbours joined; nowhere if no row has it.

        ValueError if some have it and others not, or if it has other entries than are trained.
        """
        layout = fetched.layout(name)
        known = self._runs.get(layout)
        if known is not None:
            return known
        found = [layout.length(place) for place in self.places]
        absent = [key for key, size in zip(self.keys, found, strict=True) if size < 0]
        if absent and (len(absent) < len(found) or name == "labels"):
            raise ValueError(
                f"{name} is to be all-present or all-absent in a pack, and "
                f"{', '.join(absent[:5])} of {len(found)} rows have none"
            )
        runs: list[tuple[int, int]] = []
        if not absent:
            for key, size, due in zip(self.keys, found, self.lengths, strict=True):
                if size != due:
                    raise ValueError(
                        f"key {key!r}: {name} has {size} entries for {due} trained tokens"
                    )
            runs = layout.runs(self.places)
        self._runs[layout] = runs
        return runs

    def is_alone(
        self, joined: Joined, runs: Sequence[tuple[int, int]], matrix: torch.Tensor
    ) -> bool:
        """Whether a field was read for this pack alone, padding included, and needs no copy."""
        values = joined.values
        return (
            len(matrix) == 1
            and values.shape == matrix.shape[1:]
            and values.dtype == matrix.dtype
            and list(runs) == [(0, joined.layout.starts[-1])]
        )
