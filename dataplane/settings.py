"""Settings as they are given, by a caller or by the environment: checked, and refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

from dataplane.errors import InvalidRequest

Made = TypeVar("Made", bound=BaseSettings)

MOST: Final = 5
"""Faults that are told."""


def checked(kind: type[Made], given: Mapping[str, Any], what: str = "settings") -> Made:
    """Settings of this kind; the environment fills what is not given.

    InvalidRequest says of each that is wrong what it may be, and which variable set it if no caller
    did. No secret is a setting, so the values are told too.
    """
    try:
        return kind(**given)
    except ValidationError as error:
        prefix = str(kind.model_config.get("env_prefix", ""))
        faults = [_fault(cast("Any", each), given, prefix) for each in error.errors()]
        more = f"; and {len(faults) - MOST} more" if len(faults) > MOST else ""
        raise InvalidRequest(f"{what}: {'; '.join(faults[:MOST])}{more}") from None
    except SettingsError as error:
        raise InvalidRequest(f"{what}: {error}") from None


def _fault(error: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> str:
    place = [str(part) for part in error["loc"]]
    said = str(error["msg"]).removeprefix("Value error, ")
    if not place:
        return said
    if error["type"] == "extra_forbidden":
        return f"there is no setting {'.'.join(place)!r:.80}"
    name = ".".join(place)
    if place[0] not in given:
        name += f" ({prefix}{'__'.join(place)})".upper()
    return f"{name}: {said}, not {error['input']!r:.80}"
