"""Settings as YAML: read strictly, and written.

Owns three differences to plain YAML 1.1: a name that stands twice in a mapping is an error instead
of the last one winning, `1e-3` is a number, and no tag makes an object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from trainer.config.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """A safe loader with the differences above."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is set twice", key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", _NUMBER, list("-+0123456789")
)


def parsed(text: str) -> Any:
    """What the text stands for. ValueError says what is wrong with it, and where."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}{error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]


def read(path: Path) -> dict[str, Any]:
    """The mapping that a file holds. ConfigError if there is no such file, or it holds none."""
    source = str(path)
    try:
        data = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(source, [f"cannot be read: {error.strerror or error}"]) from None
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from None
    if not isinstance(data, Mapping):
        raise ConfigError(source, ["is no mapping of sections, such as `train:` with settings"])
    return cast("dict[str, Any]", data)


def written(data: Mapping[str, Any]) -> str:
    """The data as YAML, in its own order."""
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
