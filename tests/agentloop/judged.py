"""Trajectories as judges see them."""

from __future__ import annotations

from typing import Any

from agentloop.trajectory.state import RolloutState


def judged(response: str | None, /, **row: Any) -> RolloutState:
    """A finished trajectory with this answer and this dataset row."""
    return RolloutState(
        messages=[{"role": "user", "content": "What is 2 + 2?"}],
        uid="u",
        response=response,
        response_ids=[1, 2, 3],
        finish_reason="stop",
        data_source=row["data_source"] if isinstance(row.get("data_source"), str) else None,
        row=row,
    )
