"""Files that are on the disk when their writer returns, so that a folder may be renamed after."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file."""
    from safetensors import torch as files

    # Views of one piece of memory, which the format refuses, are written each.
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    cast("Any", files).save_file(plain, path, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What is in it."""
    from safetensors import torch as files

    return cast("Any", files).load_file(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def settle(folder: Path) -> None:
    """Return once the folder and all in it are on the disk."""
    for path in [*(p for p in folder.rglob("*") if not p.is_symlink()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
