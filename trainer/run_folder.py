"""The folder of a run: where everything it writes is, held by one process at a time.

    metrics.jsonl  picture.png  summary.json  settings.yaml  trainer_meta.json
    report.html  plane.json
    logs/env.json  logs/trainer.log           trajectories/  model/
    checkpoints/ckpt-step-{n}                 hf/hf-step-{n}
    earlier/{n}/                              what runs wrote that began here before

Owns the names. What is in the files belongs to those who write them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainer.checkpoint import Checkpoints, disk
from trainer.config.masking import masked
from trainer.config.yaml_file import written
from trainer.environment import environment

LOCK: Final = ".lock"
OF_ONE_RUN: Final = (
    "metrics.jsonl picture.png report.html plane.json summary.json settings.yaml logs trajectories "
    "model tensorboard"
).split()
"""What is set aside when another run begins in the folder; checkpoints and exports are counted by
`trainer_meta.json`, and stay."""


class RunFolderInUse(RuntimeError):
    """Another process runs in this folder."""


class RunFolder:
    """A run's folder. Nothing is made or changed before `take`."""

    def __init__(
        self, path: Path, *, keep: int | None = None, keep_exports: int | None = None
    ) -> None:
        """`keep`, `keep_exports`: how many checkpoints and exports stay; None: all."""
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "picture.png"
        self.report = path / "report.html"
        self.summary = path / "summary.json"
        self.settings = path / "settings.yaml"
        self.logs = path / "logs"
        self.log = self.logs / "trainer.log"
        self.environment = self.logs / "env.json"
        self.trajectories = path / "trajectories"
        self.model = path / "model"
        self.checkpoints = Checkpoints(path, keep=keep, keep_exports=keep_exports)
        self._lock = -1

    @property
    def run_id(self) -> str:
        """Names what runs here: it stays the same when the run is resumed."""
        run_id = self.checkpoints.run_id
        if run_id is None:
            raise RuntimeError(f"no run has begun in {str(self.path)!r}")
        return run_id

    def take(self) -> None:
        """Make the folder and hold it until `release`, or until this process ends; tidy up what a
        killed run left half written.

        Raises:
            RunFolderInUse: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RunFolderInUse(
                f"another run writes to {str(self.path)!r}: wait for it, or set another folder"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        disk.remove_leftovers(self.logs)
        self.checkpoints.recover()

    def begin(self, run_id: str) -> None:
        """A new run begins: what an earlier one wrote is set aside, not removed."""
        left = [path for name in OF_ONE_RUN if (path := self.path / name).exists()]
        if left:
            aside = self.path / "earlier"
            taken = [int(p.name) for p in aside.glob("*") if p.name.isdecimal()]
            place = aside / str(max(taken, default=0) + 1)
            place.mkdir(parents=True)
            for path in left:
                path.rename(place / path.name)
        self.checkpoints.begin(run_id)
        self._make_folders()

    def go_on(self) -> None:
        """The latest run goes on."""
        self._make_folders()

    def write_environment(self) -> None:
        """Versions and listed variables, into `logs/env.json`."""
        disk.replace_file(self.environment, disk.json_bytes(environment()))

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """All settings, defaults included, without what looks like a secret."""
        disk.replace_file(self.settings, written(masked(settings)).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What came out. ValueError if a number is not finite."""
        disk.replace_file(self.summary, disk.json_bytes(dict(summary)))

    def release(self) -> None:
        """Let others run here; repeatable."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> RunFolder:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _make_folders(self) -> None:
        for folder in (self.logs, self.trajectories):
            folder.mkdir(exist_ok=True)
