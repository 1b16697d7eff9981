"""How Python child processes are started that make data or judge it: importing what we import."""

from __future__ import annotations

import os
import sys
from typing import Final

_KEPT: Final = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "VIRTUAL_ENV",
)  # fmt: skip
"""All that a child gets of the environment: it may work on what a model wrote."""


def python_child(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Its environment: it imports what this process can, and gets no secrets."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        # Sets of text are walked in the same order in every process.
        "PYTHONHASHSEED": "0",
        # Each thread of a linear-algebra library would reserve address space.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
