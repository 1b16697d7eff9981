"""Bytes that would do something if anybody took them for code: each makes a folder.

Nothing that is received, read from a disk or found in a row may ever do that.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Canary:
    """A pickle of this makes a folder when somebody loads it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def canaries(path: Path) -> Iterator[tuple[str, bytes]]:
    """What makes this folder, in each form that something loads without being asked twice."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield f"pickle {protocol}", pickle.dumps(Canary(path), protocol)
    saved = io.BytesIO()
    torch.save({"x": Canary(path)}, saved)
    yield "torch.save", saved.getvalue()
    legacy = io.BytesIO()
    torch.save(Canary(path), legacy, _use_new_zipfile_serialization=False)
    yield "torch.save, legacy", legacy.getvalue()
    array = io.BytesIO()
    np.save(array, np.array([Canary(path)], object), allow_pickle=True)
    yield "npy", array.getvalue()
