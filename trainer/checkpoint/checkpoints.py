"""The checkpoints and exports of a run folder: saved, counted, removed, found again.

Owns the order of things. A folder is published, then recorded with those it replaces left out, and
those are removed last: a kill in between leaves more than there should be, never less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint import disk
from trainer.checkpoint.checkpoint import Checkpoint, read_state
from trainer.checkpoint.errors import CheckpointError, CheckpointUnusable
from trainer.checkpoint.manifest import read_manifest, write_manifest
from trainer.checkpoint.record import Experiment, Record, read_record, write_record
from trainer.checkpoint.saving import CheckpointSaving, Saving
from trainer.checkpoint.series import Series


class Latest(NamedTuple):
    """What a run can go on from."""

    checkpoint: Checkpoint | None
    """The newest whole one."""
    refused: list[CheckpointUnusable]
    """Newer ones that are not, and why."""


class Checkpoints:
    """Those of one run folder; one process writes at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_exports: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Looks at nothing yet. `keep`: how many of the newest stay; None: all."""
        self.folder = folder
        self._keep = keep
        self._keep_exports = keep_exports
        self._clock = clock
        self.saved = Series(folder / "checkpoints", "ckpt-step")
        self.exported = Series(folder / "hf", "hf-step")

    @property
    def run_id(self) -> str | None:
        """The latest experiment; None before the first."""
        latest = self._record().latest
        return None if latest is None else latest.run_id

    def begin(self, run_id: str) -> None:
        """From now on this experiment is the latest. Its own checkpoints stay with it."""
        record = self._record()
        known = (e for e in record.experiments if e.run_id == run_id)
        self._write(record.with_latest(next(known, Experiment(run_id=run_id))))

    def saving(self, step: int) -> CheckpointSaving:
        """A checkpoint to fill and publish."""
        run_id = self._needed_run_id()

        def publish(folder: Path) -> Path:
            read_state(folder, run_id=run_id, step=step)  # found now, and not on resume
            write_manifest(folder, run_id=run_id, step=step, saved_at=self._clock())
            self._forget_beyond(self.saved, self._latest().checkpoints, step)
            path = self.saved.publish(folder, step)
            self._recorded(self._latest().with_checkpoint(step, self._keep))
            return path

        return CheckpointSaving(self.saved.begin(step), publish)

    def exporting(self, step: int) -> Saving:
        """A folder for weights in the form of transformers, to fill and publish."""
        self._needed_run_id()

        def publish(folder: Path) -> Path:
            self._forget_beyond(self.exported, self._latest().exports, step)
            path = self.exported.publish(folder, step)
            self._recorded(self._latest().with_export(step, self._keep_exports))
            return path

        return Saving(self.exported.begin(step), publish)

    def latest(self) -> Latest:
        """The newest whole checkpoint of the latest experiment. Changes nothing."""
        latest = self._seen().latest
        refused: list[CheckpointUnusable] = []
        for step in reversed([] if latest is None else latest.checkpoints):
            try:
                return Latest(Checkpoint.read(self.saved.path(step)), refused)
            except CheckpointUnusable as error:
                refused.append(error)
        return Latest(None, refused)

    def recover(self) -> list[Path]:
        """Bring folders and record in line after a kill, and remove what was half written; what
        was removed. Only while nothing is being saved."""
        removed = disk.remove_leftovers(self.folder)
        removed += self.saved.recover() + self.exported.recover()
        record = self._seen()
        latest = record.latest
        if latest is not None:
            if latest.checkpoints:
                latest = latest.with_checkpoint(latest.checkpoints[-1], self._keep)
            if latest.exports:
                latest = latest.with_export(latest.exports[-1], self._keep_exports)
            before, after = record.latest, record.with_latest(latest)
            if after != self._record():
                self._write(after)
            self._discard(before or latest, latest)
        return removed

    # -- the record -----------------------------------------------------------------------------

    def _record(self) -> Record:
        return read_record(self.folder) or Record()

    def _write(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder, record)

    def _latest(self) -> Experiment:
        latest = self._record().latest
        assert latest is not None
        return latest

    def _needed_run_id(self) -> str:
        run_id = self.run_id
        if run_id is None:
            raise CheckpointError(
                f"{str(self.folder)!r} has no experiment: begin one before saving"
            )
        return run_id

    def _recorded(self, latest: Experiment) -> None:
        before = self._latest()
        self._write(self._record().with_latest(latest))
        self._discard(before, latest)

    def _discard(self, before: Experiment, after: Experiment) -> None:
        for step in set(before.checkpoints).difference(after.checkpoints):
            self.saved.discard(step)
        for step in set(before.exports).difference(after.exports):
            self.exported.discard(step)

    def _forget_beyond(self, series: Series, steps: Sequence[int], step: int) -> None:
        """Training went back to an earlier step: what it had saved beyond must not come back."""
        for other in steps:
            if other > step:
                series.discard(other)

    def _seen(self) -> Record:
        """The record as the folders have it: without what is gone, and with what was published
        and not recorded before a kill."""
        record = self._record()
        there, exports = set(self.saved.numbers()), set(self.exported.numbers())
        experiments = {
            e.run_id: e.model_copy(
                update={
                    "checkpoints": [step for step in e.checkpoints if step in there],
                    "exports": [step for step in e.exports if step in exports],
                }
            )
            for e in record.experiments
        }
        recorded = set(experiments)
        order = {run_id: float(number) for number, run_id in enumerate(experiments)}
        listed = {step for e in experiments.values() for step in e.checkpoints}
        for step in sorted(there - listed):
            try:
                manifest = read_manifest(self.saved.path(step))
            except CheckpointUnusable:
                continue  # nobody knows whose it is
            run_id = manifest.run_id
            if run_id not in recorded:
                if recorded:
                    continue  # somebody else put it there
                order[run_id] = max(order.get(run_id, 0.0), manifest.saved_at)
            whose = experiments.get(run_id, Experiment(run_id=run_id))
            steps = sorted({*whose.checkpoints, step})
            experiments[run_id] = whose.model_copy(update={"checkpoints": steps})
        ordered = [experiments[run_id] for run_id in sorted(experiments, key=order.__getitem__)]
        if ordered:
            listed = {step for e in ordered for step in e.exports}
            steps = sorted(exports - listed | set(ordered[-1].exports))
            ordered[-1] = ordered[-1].model_copy(update={"exports": steps})
        return record.model_copy(update={"experiments": ordered})
