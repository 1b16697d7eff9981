"""Checkpoints of a plane: saved into a folder, and loaded from one.

Owns nothing but the way there: the file formats take a tenth of a second to import, and few
processes need them.
"""

from __future__ import annotations

import os
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb


def save_checkpoint(
    core: Core, path: str | os.PathLike[str], overwrite: bool, deadline: float
) -> Verb[dict[str, Any]]:
    """Save the plane as of now; a summary."""
    from dataplane.client.saving import save

    return (yield from save(core, path, overwrite, deadline))


def load_checkpoint(
    core: Core, path: str | os.PathLike[str], deadline: float
) -> Verb[dict[str, Any]]:
    """Put a checkpoint into an empty plane; a summary."""
    from dataplane.client.loading import load

    return (yield from load(core, path, deadline))
