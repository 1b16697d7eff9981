"""Metrics for TensorBoard, as event files in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from trainer.report.tracker import TrackerNotInstalled


class TensorBoard:
    """A tracker that writes event files."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils import tensorboard as untyped
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "tensorboard":
                raise
            raise TrackerNotInstalled("tensorboard", "tensorboard") from error
        self._writer = cast("Any", untyped).SummaryWriter(str(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A point of each value's curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()


def tensorboard(folder: str | Path) -> TensorBoard:
    """A tracker that writes TensorBoard's event files to this folder.

    Raises:
        TrackerNotInstalled: the package is not there.
    """
    return TensorBoard(Path(folder))
