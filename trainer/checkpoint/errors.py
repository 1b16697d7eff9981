"""Errors of checkpoints: damaged ones, and what cannot be resumed."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(RuntimeError):
    """Something about checkpoints that training cannot go on with; the message says what to do."""


class CheckpointUnusable(CheckpointError):
    """A checkpoint that is not what was saved. `path` and `reason` say which, and why."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"the checkpoint {str(path)!r} is refused: {reason}")
