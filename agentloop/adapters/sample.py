"""A sample of another project: an object with attributes or a mapping, read by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def read(sample: object, name: str, default: Any = None) -> Any:
    """One attribute or entry; the default where there is none."""
    if isinstance(sample, Mapping):
        return cast("Mapping[str, Any]", sample).get(name, default)
    return getattr(sample, name, default)


def has(sample: object, name: str) -> bool:
    """Whether it carries this one, with a value."""
    return read(sample, name) is not None


def text(value: object) -> str | None:
    """The value of an enumeration or a string; None for None."""
    return None if value is None else str(getattr(value, "value", value))


def flat(values: Any) -> list[Any] | None:
    """A list of a list, an array or a tensor of one row; None for None."""
    if values is None:
        return None
    listed: Any = values.reshape(-1).tolist() if hasattr(values, "reshape") else list(values)
    return listed
