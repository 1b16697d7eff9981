"""A report, written to a file: from a run's folder, from a plane's record, or from both."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dataplane.report.page import page
from dataplane.report.record import PlaneRecord, as_json
from dataplane.report.run_folder import PLANE, read_plane, read_run


def write_report(
    path: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    plane: PlaneRecord | None = None,
) -> Path:
    """Write one HTML page about a run and its plane, which needs nothing beside it; its path.

    `run` is the folder of a run: its metrics are drawn, and the plane's record that it left
    (`plane.json`) unless one is given. `plane` comes from `Client.record()`.

    Raises:
        InvalidRequest: there is no such folder, or its record of a plane is none.
    """
    told = None
    if run is not None:
        told = read_run(Path(run))
        plane = read_plane(Path(run)) if plane is None else plane
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, page(told, plane, made_at_s=time.time()))
    return target


def keep_record(plane: PlaneRecord, run: str | os.PathLike[str]) -> Path:
    """Write a plane's record into a run's folder, for reports that are made after it has ended."""
    target = Path(run) / PLANE
    _replace(target, as_json(plane))
    return target


def _replace(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, target)
