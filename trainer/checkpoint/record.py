"""Which checkpoints and exports each experiment of a run folder has: `trainer_meta.json`.

Owns the format of that file. An experiment is what began afresh once and was resumed from then on;
the last one listed is the latest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.checkpoint import disk
from trainer.checkpoint.errors import CheckpointError

RECORD: Final = "trainer_meta.json"
VERSION: Final = 1
"""Version n reads n and n - 1."""

Step = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Experiment(_Entry):
    """One experiment: steps of what it saved, ascending."""

    run_id: Annotated[str, Field(min_length=1)]
    checkpoints: list[Step] = []
    exports: list[Step] = []

    def with_checkpoint(self, step: int, keep: int | None) -> Experiment:
        """The same with this one, and only so many of the newest."""
        return self.model_copy(update={"checkpoints": _newest(self.checkpoints, step, keep)})

    def with_export(self, step: int, keep: int | None) -> Experiment:
        """The same with this one, and only so many of the newest."""
        return self.model_copy(update={"exports": _newest(self.exports, step, keep)})


class Record(_Entry):
    """The file."""

    format: Literal["trainer-checkpoints"] = "trainer-checkpoints"
    version: int = VERSION
    experiments: list[Experiment] = []

    @property
    def latest(self) -> Experiment | None:
        """The experiment that began last."""
        return self.experiments[-1] if self.experiments else None

    def with_latest(self, experiment: Experiment) -> Record:
        """The same with this experiment as the latest. A folder has one of a number: the others
        lose what it has."""
        others = [
            other.model_copy(
                update={
                    "checkpoints": _less(other.checkpoints, experiment.checkpoints),
                    "exports": _less(other.exports, experiment.exports),
                }
            )
            for other in self.experiments
            if other.run_id != experiment.run_id
        ]
        return self.model_copy(update={"experiments": [*others, experiment]})


def read_record(folder: Path) -> Record | None:
    """The record of a run folder; None if there is none.

    Raises:
        CheckpointError: it is damaged, or of a version that is not read here.
    """
    path = folder / RECORD
    try:
        data: Any = json.loads(path.read_bytes())
        record = Record.model_validate(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error}; move it away, and it is made again from the "
            "checkpoints that are there"
        ) from None
    if record.version != VERSION:
        raise CheckpointError(
            f"{str(path)!r} has version {record.version}, and this program reads {VERSION}"
        )
    return record


def write_record(folder: Path, record: Record) -> None:
    """Put the record in place of the one before."""
    disk.replace_file(folder / RECORD, disk.json_bytes(record.model_dump()))


def _newest(steps: Sequence[int], step: int, keep: int | None) -> list[int]:
    # What lies beyond this step was saved before training went back to an earlier one.
    kept = sorted({step, *(other for other in steps if other < step)})
    return kept if keep is None else kept[-keep:]


def _less(steps: Sequence[int], gone: Sequence[int]) -> list[int]:
    return [step for step in steps if step not in gone]
