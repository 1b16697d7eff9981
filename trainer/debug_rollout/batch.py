"""A batch of the plane as plain data: its rows with their tags and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SavedRow:
    """One row of the plane."""

    key: str
    tags: dict[str, Any]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DebugRollout:
    """A batch: what training of a step needs of its rollouts."""

    step: int
    prompts: tuple[tuple[str, SavedRow | None, tuple[SavedRow, ...]], ...]
    """(uid, the prompt's row, its trajectories), in the order in which they were taken."""
    raw_rewards: tuple[float, int] = (0.0, 0)
    """Sum and count of the scores that producers saw."""

    @property
    def rows(self) -> list[SavedRow]:
        """All trajectories."""
        return [row for _, _, rows in self.prompts for row in rows]
