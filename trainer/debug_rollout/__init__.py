"""Batches in files, to train on them again without rollouts.

rollout = await capture(client, "train", sample.groups, step=step, raw_rewards=(total, count))
await save(folder, rollout)
...
await replay(client, "train", await load(folder, step))
"""

from __future__ import annotations

from trainer.debug_rollout.batch import DebugRollout, SavedRow
from trainer.debug_rollout.file import BadDebugRollout, load, save, saved_steps
from trainer.debug_rollout.plane import capture, replay

__all__ = [
    "BadDebugRollout",
    "DebugRollout",
    "SavedRow",
    "capture",
    "load",
    "replay",
    "save",
    "saved_steps",
]
