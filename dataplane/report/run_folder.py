"""What a run left in its folder, as far as a report tells of it: metrics, summary, versions.

Owns the reading of those files; a line or a file that is none is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from dataplane.errors import InvalidRequest
from dataplane.report.record import PlaneRecord, from_json
from dataplane.report.run_record import RunRecord, Step

METRICS: Final = "metrics.jsonl"
PLANE: Final = "plane.json"
SHOWN_PACKAGES: Final = ("rl-dataplane", "torch", "ray", "transformers")
MAX_STEPS: Final = 100_000
MAX_FILE_BYTES: Final = 64 << 20


def read_run(folder: Path) -> RunRecord:
    """The run in a folder. InvalidRequest if there is none."""
    if not folder.is_dir():
        raise InvalidRequest(f"there is no run folder {str(folder)!r}")
    environment = _json(folder / "logs" / "env.json")
    packages = environment.get("packages")
    versions = {"python": str(environment.get("python", ""))} if environment else {}
    if isinstance(packages, dict):
        known = cast("dict[str, Any]", packages)
        versions |= {name: str(known[name]) for name in SHOWN_PACKAGES if name in known}
    return RunRecord(
        name=folder.resolve().name,
        steps=_steps(folder / METRICS),
        summary=_json(folder / "summary.json"),
        versions=versions,
        run_id=_run_id(folder),
    )


def read_plane(folder: Path) -> PlaneRecord | None:
    """The plane's record that the run left; None if it left none."""
    path = folder / PLANE
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _steps(path: Path) -> list[Step]:
    """Each step as it was logged last. Lines of optimizer steps have no time of a step."""
    found: dict[int, Step] = {}
    try:
        lines = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return []
    with lines:
        for text in lines:
            try:
                line = cast("dict[str, Any]", json.loads(text))
                values = _numbers(cast("dict[str, Any]", line["values"]))
                step, at = int(line["step"]), float(line["time"])
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            if any(not name.startswith(("train_metrics/", "sft_train")) for name in values):
                before = found.get(step)
                merged = values if before is None else {**before.values, **values}
                found[step] = Step(step, at, merged)
                if len(found) > MAX_STEPS:
                    del found[min(found)]
    return [found[step] for step in sorted(found)]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and abs(value) < 1e300
    }


def _run_id(folder: Path) -> str:
    experiments = _json(folder / "trainer_meta.json").get("experiments")
    if isinstance(experiments, list) and experiments:
        last: Any = cast("list[Any]", experiments)[-1]
        if isinstance(last, dict):
            return str(cast("dict[str, Any]", last).get("run_id", ""))
    return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", document) if isinstance(document, dict) else {}
