"""`--set section.name=value`: single settings put over those of the file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from trainer.config.names import Path
from trainer.config.yaml_file import parsed


def override(
    data: Mapping[str, Any],
    assignments: Sequence[str],
    spell_out: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> tuple[dict[str, Any], list[Path], list[str]]:
    """A copy of the data with the assignments, the ways that were set, and what is wrong with the
    others.

    The value is YAML, sections on the way are made where they are missing, and a number on the way
    is a place in a list that is there. `spell_out` is applied before and after each, so that a
    setting can be put into what was a short form.

    Example: `train.batch_size=8`, `ranks={count: 1}`, `warmup.0.lr=1e-3`.
    """
    result = spell_out(copy.deepcopy(dict(data)))
    ways: list[Path] = []
    problems: list[str] = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"--set {assignment!r}: write section.name=value")
            continue
        try:
            ways.append(_put(result, parts, parsed(text)))
        except ValueError as error:
            problems.append(f"--set {name}: {error}")
        result = spell_out(result)
    return result, ways, problems


def _put(data: dict[str, Any], parts: Sequence[str], value: Any) -> Path:
    way: list[str | int] = []
    holder: Any = data
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(holder, list):
            entries = cast("list[Any]", holder)
            if not part.isdecimal() or int(part) >= len(entries):
                raise ValueError(f"{part!r} is no place in a list of {len(entries)}")
            way.append(int(part))
            if last:
                entries[int(part)] = value
            holder = entries[int(part)]
        elif isinstance(holder, dict):
            section = cast("dict[str, Any]", holder)
            way.append(part)
            if last:
                section[part] = value
            elif section.get(part) is None:
                section[part] = {}
            holder = section[part]
        else:
            raise ValueError(f"{'.'.join(parts[:number])} is a value, and no section")
    return tuple(way)
