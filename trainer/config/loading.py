"""From a file and the command line to settings, or to everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer.config.errors import ConfigError
from trainer.config.masking import MASK, looks_secret
from trainer.config.names import Names, Path, dotted, names_of, nearest, unknown, without
from trainer.config.overrides import override
from trainer.config.sections import spelled_out_kind, spelled_out_model, spelled_out_stop
from trainer.config.settings import Resolve, RunSettings
from trainer.config.yaml_file import read


def _spelled_out_train(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    train = cast("Mapping[str, Any]", value)
    return {n: spelled_out_stop(v) if n == "stop_at" else v for n, v in train.items()}


_SHORT_FORMS = {
    "model": spelled_out_model,
    "engine": spelled_out_kind,
    "train": _spelled_out_train,
}


def load_settings(
    path: FilePath, assignments: Sequence[str] = (), *, resolve: Resolve | None = None
) -> RunSettings:
    """The settings of a YAML file, with single ones put over them.

    Args:
        assignments: As after `--set`: `section.name=value`.
        resolve: What dotted names of losses stand for; without it they are refused.

    Raises:
        ConfigError: with everything that is wrong.
    """
    return settings_from(read(path), assignments, source=str(path), resolve=resolve)


def settings_from(
    data: Mapping[str, Any],
    assignments: Sequence[str] = (),
    *,
    source: str = "settings",
    resolve: Resolve | None = None,
) -> RunSettings:
    """The same from data that was read already."""
    data, ways, problems = override(data, assignments, _spelled_out)
    names = names_of(RunSettings)
    assert names is not None
    foreign = list(unknown(data, names))
    problems += [_no_such_setting(path, names, ways) for path in foreign]
    settings: RunSettings | None = None
    try:
        settings = RunSettings.model_validate(without(data, foreign), context={"resolve": resolve})
    except ValidationError as error:
        problems += worded(error)
    if problems or settings is None:
        raise ConfigError(source, problems)
    return settings


def _spelled_out(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _SHORT_FORMS.get(name, _same)(value) for name, value in data.items()}


def _same(value: object) -> object:
    return value


def _no_such_setting(path: Path, names: Names, ways: Sequence[Path]) -> str:
    of_command = any(way[: len(path)] == path[: len(way)] for way in ways)
    meant = nearest(path, names)
    hint = "" if meant is None else f"; did you mean {meant}?"
    return f"{'--set ' if of_command else ''}{dotted(path)}: no such setting{hint}"


def worded(error: ValidationError) -> list[str]:
    """Each error once, in words that name the setting as it is written."""
    lines: dict[str, None] = {}
    union: dict[Path, list[str]] = {}
    for found in error.errors(include_url=False):
        path = _written_path(found)
        if path == ():
            lines.update(dict.fromkeys(_message(found).splitlines()))
        elif _is_branch(found["loc"]):
            # A value that fits none of several types has an error for each of them.
            union.setdefault(path, []).append(_message(found))
        else:
            lines[_line(path, _message(found), found)] = None
    for path, messages in union.items():
        lines[f"{dotted(path)}: {', or '.join(dict.fromkeys(messages))}"] = None
    return list(lines)


def _line(path: Path, message: str, found: ErrorDetails) -> str:
    where = dotted(path)
    if found["type"] == "missing":
        return f"{where}: is not set"
    if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: no such setting"
    if message.startswith(f"{path[-1]}: "):  # settings that name their own section
        return f"{dotted(path[:-1])}.{message}" if len(path) > 1 else message
    value = found["input"]
    if found["type"] == "value_error" or isinstance(value, Mapping | list):
        return f"{where}: {message}"
    hidden = any(looks_secret(str(part)) for part in path)
    return f"{where}: {message}, not {MASK if hidden else repr(value)}"


def _message(found: ErrorDetails) -> str:
    if found["type"] in ("model_type", "dataclass_type", "model_attributes_type"):
        return "should be a section with settings"
    text = found["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return text if text == found["msg"] or found["type"] == "value_error" else f"should be {text}"


def _is_branch(loc: Sequence[str | int]) -> bool:
    return any(isinstance(part, str) and not _is_name(part) for part in loc) or loc[-1:] == ("str",)


def _written_path(found: ErrorDetails) -> Path:
    """The way without what pydantic adds for types of a union."""
    parts = [part for part in found["loc"] if isinstance(part, int) or _is_name(part)]
    if found["type"].endswith("_type") and parts and parts[-1] in ("str", "int", "float", "bool"):
        parts.pop()
    return tuple(parts)


def _is_name(part: str) -> bool:
    return part.replace("_", "").isalnum() and part[0].islower()
