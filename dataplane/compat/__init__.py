"""TransferQueue's public interface over this plane, for code that says `import transfer_queue`.

The package of that name lies in this folder and nothing else does, so that the folder can stand on
a path. `activate()` puts it there, for this process, its children and the workers of a Ray cluster
that is joined later; `PYTHONPATH=$(python -m dataplane.compat)` does the same from outside.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HOOK = "dataplane.compat.with_path"
"""Ray calls what RAY_RUNTIME_ENV_HOOK names with the runtime environment of each job."""


def folder() -> str:
    """The folder that has `transfer_queue` in it."""
    return str(Path(__file__).resolve().parent)


def activate() -> None:
    """Make `import transfer_queue` mean this plane, here, in child processes and in Ray workers.

    Call it before `transfer_queue` is imported and before `ray.init`. Repeatable.

    Raises ImportError if another `transfer_queue` was imported already: its classes would mix with
    these.
    """
    here = folder()
    imported = sys.modules.get("transfer_queue")
    origin = str(getattr(imported, "__file__", "") or "")
    if imported is not None and not origin.startswith(here + os.sep):
        raise ImportError(
            f"transfer_queue was imported already, from {origin or 'nowhere'}: call "
            "dataplane.compat.activate() before anything imports it"
        )
    if here not in sys.path:
        sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = _before(os.environ.get("PYTHONPATH"))
    os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", HOOK)


def with_path(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """A Ray job's runtime environment with this folder on the path of its workers."""
    given = dict(runtime_env or {})
    variables = dict(given.get("env_vars") or {})
    inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    variables["PYTHONPATH"] = _before(inherited)
    return {**given, "env_vars": variables}


def _before(path: str | None) -> str:
    """A search path that begins with this folder."""
    others = [part for part in (path or "").split(os.pathsep) if part and part != folder()]
    return os.pathsep.join([folder(), *others])
