"""A stage of a training rank that never ends, for rows that ask for it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from trainer.materialize import PackTensors
from trainer.ranks.trainee import Trainee

MARK = "stall"


def stall(folder: str, pack: PackTensors, trainee: Trainee) -> torch.Tensor:
    """Says in a file of the folder that it is there, and stays, if a key of the pack begins with
    `stall`."""
    if any(key.startswith(MARK) for key in pack.keys):
        (Path(folder) / str(trainee.peers.rank)).touch()
        threading.Event().wait()
    return torch.zeros(pack.labels.shape)
