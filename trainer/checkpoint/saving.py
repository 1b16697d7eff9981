"""What is being saved: a folder that is filled and then published, or leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import disk
from trainer.checkpoint.checkpoint import (
    PLANE,
    WEIGHTS,
    TrainState,
    write_rollouts,
    write_state,
)


class Saving:
    """A folder on its way. Blocking: in an event loop, publish in a thread.

    with checkpoints.saving(step) as saving:
        …                       # fill saving.folder
        saving.publish()
    """

    def __init__(self, folder: Path, publish: Callable[[Path], Path]) -> None:
        self.folder = folder
        self._publish = publish
        self._published: Path | None = None

    def publish(self) -> Path:
        """Put it in its place, whole; where it is then. Nothing in the folder may be open."""
        if self._published is None:
            self._published = self._publish(self.folder)
        return self._published

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *_: object) -> None:
        if self._published is None:
            disk.remove(self.folder)


class CheckpointSaving(Saving):
    """A checkpoint on its way."""

    def __init__(self, folder: Path, publish: Callable[[Path], Path]) -> None:
        super().__init__(folder, publish)
        self.weights = folder / WEIGHTS
        """For the ranks to fill; it is there."""
        self.plane = folder / PLANE
        """For the plane to fill; it is not there yet."""
        self.weights.mkdir()

    def __enter__(self) -> CheckpointSaving:
        return self

    def write_state(self, state: TrainState) -> None:
        """Where training is. Needed."""
        write_state(self.folder, state)

    def write_rollouts(self, rollouts: Mapping[str, Any]) -> None:
        """Where the datasets are."""
        write_rollouts(self.folder, rollouts)
