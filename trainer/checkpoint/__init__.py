"""Checkpoints of a run: folders that are there whole or not at all, and which of them stay.

Owns `checkpoints/ckpt-step-{n}`, `hf/hf-step-{n}` and `trainer_meta.json` of a run folder; what is
in `weights/` and `plane/` belongs to ranks and plane.

    checkpoints = Checkpoints(folder, keep=3)
    checkpoints.begin(run_id)
    with checkpoints.saving(40) as saving:
        …                                   # fill saving.weights and saving.plane
        saving.write_state(TrainState(cur_step=40, model_step=40, run_id=run_id, seed=42))
        saving.publish()
    checkpoints.latest().checkpoint
"""

from __future__ import annotations

from trainer.checkpoint.checkpoint import Checkpoint, TrainState
from trainer.checkpoint.checkpoints import Checkpoints, Latest
from trainer.checkpoint.errors import CheckpointError, CheckpointUnusable
from trainer.checkpoint.random_states import random_states, restore_random_states
from trainer.checkpoint.saving import CheckpointSaving, Saving

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointSaving",
    "CheckpointUnusable",
    "Checkpoints",
    "Latest",
    "Saving",
    "TrainState",
    "random_states",
    "restore_random_states",
]
