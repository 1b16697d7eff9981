"""Weights as files, for a server that loads them from a folder. Owns the folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import torch

KEPT: Final = 2
"""Versions that stay: a server may still read the last but one."""


def save_weights(weights: Mapping[str, torch.Tensor], root: Path, version: int) -> Path:
    """The folder that holds these weights, written as a whole or not at all. Older ones go."""
    from safetensors import torch as files

    folder = root / f"weights-{version}"
    part = root / f".weights-{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    # Cloned, because tied weights share memory, which the format refuses.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    cast("Any", files).save_file(copies, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    saved = sorted(root.glob("weights-*"), key=lambda path: int(path.name.split("-")[-1]))
    for old in [path for path in saved if path != folder][: -(KEPT - 1) or None]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
