"""Files of batches: `debug_rollout_{step}.pt`, plain containers of tensors and plain data.

Owns the form of these files. They are read with weights-only loading, and their size is checked
before it is believed.
"""

from __future__ import annotations

import asyncio
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from trainer.debug_rollout.batch import DebugRollout, SavedRow
from trainer.debug_rollout.plain_data import PlainData, text

FORMAT: Final = 1
GLOB: Final = "debug_rollout_*.pt"
_NAME: Final = re.compile(r"debug_rollout_(0|[1-9]\d*)\.pt")


class BadDebugRollout(ValueError):
    """A file is no batch that was saved, or holds what no such file holds. Nothing was replayed."""


async def save(folder: str | Path, rollout: DebugRollout) -> Path:
    """Write a batch to its file, whole or not at all; the file's path."""
    return await asyncio.to_thread(_save, Path(folder), rollout)


async def load(folder: str | Path, step: int) -> DebugRollout:
    """The batch of a step.

    Raises:
        FileNotFoundError: there is no file of this step; names the step and those that are there.
        ValueError: a file of the folder has a name that is no step's.
        BadDebugRollout: the file is not one that was saved here.
    """
    return await asyncio.to_thread(_load, Path(folder), step)


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of a folder, in order; the last of them is how many a replay has by default.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file's name looks like a step's and is none.
    """
    names = sorted(path.name for path in Path(folder).glob(GLOB))
    if not names:
        raise FileNotFoundError(f"{folder} has no file {GLOB}: save rollouts there first")
    steps: list[int] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{Path(folder) / name} is no debug_rollout_STEP.pt: move it away")
        steps.append(int(match[1]))
    return sorted(steps)


def _save(folder: Path, rollout: DebugRollout) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"debug_rollout_{rollout.step}.pt"
    partial = folder / f".{target.name}.partial"
    content = {
        "format": FORMAT,
        "step": rollout.step,
        "raw_rewards": list(rollout.raw_rewards),
        "prompts": [
            {
                "uid": uid,
                "prompt": None if prompt is None else _saved(prompt),
                "rows": [_saved(row) for row in rows],
            }
            for uid, prompt, rows in rollout.prompts
        ],
    }
    try:
        torch.save(PlainData().map(content), partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _load(folder: Path, step: int) -> DebugRollout:
    steps = saved_steps(folder)
    if step not in steps:
        raise FileNotFoundError(
            f"{folder} has no rollout of step {step}; it has those of {steps[0]} to {steps[-1]}"
        )
    path = folder / f"debug_rollout_{step}.pt"
    _check_container(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of the loader's many kinds: it refuses what it does not know
        raise BadDebugRollout(f"{path} is not loaded: {str(error).splitlines()[0]}") from error
    try:
        plain = PlainData()
        rollout = _rollout(plain.map(content), step)
        if plain.nbytes > path.stat().st_size:
            raise ValueError("its tensors are larger than the file")
        return rollout
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadDebugRollout(f"{path} is no saved batch of step {step}: {error!r}") from error


def _check_container(path: Path) -> None:
    """Refuses a file that is no archive of stored entries: one that is compressed could hold far
    more than it is large."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [
                e.filename for e in archive.infolist() if e.compress_type != zipfile.ZIP_STORED
            ]
    except zipfile.BadZipFile as error:
        raise BadDebugRollout(f"{path} is no saved batch: {error}") from error
    if packed:
        raise BadDebugRollout(f"{path} has compressed entries, which no saved batch has")


def _rollout(content: Mapping[str, Any], step: int) -> DebugRollout:
    if content["format"] != FORMAT or content["step"] != step:
        raise ValueError(f"format {content['format']!r:.20}, step {content['step']!r:.20}")
    total, count = content["raw_rewards"]
    prompts = tuple(
        (
            text(entry["uid"]),
            None if entry["prompt"] is None else _row(entry["prompt"]),
            tuple(map(_row, entry["rows"])),
        )
        for entry in content["prompts"]
    )
    return DebugRollout(step, prompts, (float(total), int(count)))


def _saved(row: SavedRow) -> dict[str, Any]:
    return {"key": row.key, "tags": row.tags, "fields": row.fields}


def _row(saved: Mapping[str, Any]) -> SavedRow:
    tags, fields = saved["tags"], saved["fields"]
    if not isinstance(tags, dict) or not isinstance(fields, dict):
        raise TypeError("tags and fields of a row are maps")
    return SavedRow(
        text(saved["key"]), cast("dict[str, Any]", tags), cast("dict[str, Any]", fields)
    )
