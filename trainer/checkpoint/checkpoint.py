"""One checkpoint: what a run goes on from, as files of one folder.

Owns the layout:

    train_state.json    steps, the run's id and seed, random states
    rollouts.json       where the datasets are; missing: they begin anew
    weights/            model, optimizer and schedule, written by the ranks
    plane/              rows that were not trained, written by the plane; missing: not saved
    manifest.json       every file with its size and checksum
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from trainer.checkpoint import disk
from trainer.checkpoint.errors import CheckpointUnusable
from trainer.checkpoint.manifest import verify

STATE: Final = "train_state.json"
ROLLOUTS: Final = "rollouts.json"
WEIGHTS: Final = "weights"
PLANE: Final = "plane"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where training is."""

    cur_step: int
    """Steps that were trained."""
    model_step: int
    """The version of the weights that generate."""
    run_id: str
    seed: int
    random: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """As `random_states()` has them."""
    progress: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Counters of the loop, plain data."""

    def as_data(self) -> dict[str, Any]:
        """The content of `train_state.json`."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: object) -> TrainState:
        """Back from there. ValueError if it is no such content."""
        if not isinstance(data, Mapping):
            raise ValueError("it is no mapping")
        given = cast("Mapping[str, Any]", data)
        kinds: dict[str, type] = {"cur_step": int, "model_step": int, "run_id": str, "seed": int}
        for name, kind in kinds.items():
            if type(given.get(name)) is not kind:
                raise ValueError(f"{name} is {given.get(name)!r}, and no {kind.__name__}")
        for name in ("random", "progress"):
            if not isinstance(given.get(name, {}), Mapping):
                raise ValueError(f"{name} is no mapping")
        known = [*kinds, "random", "progress"]
        return cls(**{name: given[name] for name in known if name in given})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole one, to read from."""

    path: Path
    state: TrainState
    rollouts: Mapping[str, Any] | None
    """None: it was not saved."""

    @property
    def step(self) -> int:
        """After how many steps it was saved."""
        return self.state.cur_step

    @property
    def weights(self) -> Path:
        """What ranks load."""
        return self.path / WEIGHTS

    @property
    def plane(self) -> Path | None:
        """What the plane loads; None: it was not saved."""
        path = self.path / PLANE
        return path if path.is_dir() else None

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """The checkpoint in this folder, after a look at all of its files.

        Raises:
            CheckpointUnusable: it is not what was saved.
        """
        manifest = verify(path)
        state = read_state(path, run_id=manifest.run_id, step=manifest.step)
        rollouts: Mapping[str, Any] | None = None
        if (path / ROLLOUTS).exists():
            try:
                rollouts = json.loads((path / ROLLOUTS).read_bytes())
            except (OSError, ValueError) as error:
                raise CheckpointUnusable(path, f"{ROLLOUTS} makes no sense: {error}") from None
        return cls(path, state, rollouts)


def read_state(folder: Path, *, run_id: str, step: int) -> TrainState:
    """The state in this folder.

    Raises:
        CheckpointUnusable: there is none, or it is that of another run or step.
    """
    try:
        state = TrainState.from_data(json.loads((folder / STATE).read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointUnusable(folder, f"{STATE} makes no sense: {error}") from None
    if (state.cur_step, state.run_id) != (step, run_id):
        raise CheckpointUnusable(
            folder,
            f"{STATE} is of step {state.cur_step} of run {state.run_id!r}, and this is step {step} "
            f"of {run_id!r}",
        )
    return state


def write_state(folder: Path, state: TrainState) -> None:
    """Put the state into a checkpoint that is being saved."""
    disk.write(folder / STATE, disk.json_bytes(state.as_data()))


def write_rollouts(folder: Path, rollouts: Mapping[str, Any]) -> None:
    """Put the state of the rollouts into a checkpoint that is being saved."""
    disk.write(folder / ROLLOUTS, disk.json_bytes(dict(rollouts)))
