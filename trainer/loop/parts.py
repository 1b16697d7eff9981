"""What the stages of a run work with, and where the run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dataplane import AsyncClient
from trainer.config import RunSettings
from trainer.controller import Controller
from trainer.dump import TrajectoryDump
from trainer.ranks.group import RankGroup
from trainer.replay_buffer import ReplayBuffer
from trainer.report import OptimizerSteps, Progress, Throughput, Trackers
from trainer.rollouts import Rollouts
from trainer.run_folder import RunFolder

PARTITIONS: Final[Mapping[str, str]] = {
    "train": "train",
    "evaluate": "val",
    "demonstrate": "demonstrations",
}
"""Which partition holds what, by what rollouts are asked to do."""


@dataclass(slots=True)
class Standing:
    """Where a run stands: plain numbers, which a checkpoint keeps."""

    step: int = 0
    """Training steps that are done."""
    model_step: int = 0
    """The policy version that rollouts have."""
    optimizer_steps: int = 0
    warmed_up: bool = False
    """Whether the supervised stages are done."""
    milestones: dict[str, float] = field(default_factory=dict[str, float])
    """Held-out rewards of moments that the summary tells, by name."""

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Lane:
    """One partition on its way into the ranks: what is sampled from it, and how it is planned."""

    buffer: ReplayBuffer
    controller: Controller


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is made of, all of it open."""

    settings: RunSettings
    folder: RunFolder
    client: AsyncClient
    ranks: RankGroup
    rollouts: Rollouts | None
    """None where a run only trains on saved batches."""
    train: Lane
    demonstrations: Lane
    dump: TrajectoryDump | None
    trackers: Trackers
    progress: Progress
    throughput: Throughput
    optimizer_steps: OptimizerSteps
    standing: Standing
    run_id: str
    total_steps: int

    @property
    def producers(self) -> Rollouts:
        """The rollouts, where a stage cannot do without."""
        if self.rollouts is None:
            raise RuntimeError("this run has no rollouts: it trains on saved batches")
        return self.rollouts
