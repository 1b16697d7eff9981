"""What somebody says when a run or a group begins: read, checked, filled in. Pure.

Owns which fields there are and what they may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from agentloop.capture.ending import Identity
from agentloop.capture.refusals import invalid
from dataplane.fields import PROMPT_TAGS, RESERVED, TRAJECTORY_TAGS

RUN_TAG: Final = "capture_run"
"""The tag that says which run a row is of."""

_OWN_TAGS: Final = {*TRAJECTORY_TAGS, *PROMPT_TAGS, RUN_TAG}
"""Tags that follow from a trajectory, and that nobody else may give it."""

_IDENTITY: Final = ("uid", "session_id", "attempt", "global_steps", "task_name", "data_source")

_MAX_NAME: Final = 512


def identity_of(body: Mapping[str, Any], run_id: str, known: Mapping[str, Any]) -> Identity:
    """Whose run a body starts; `known` stands for what it does not say.

    Raises:
        Refusal: 400: a field is none that is known, or not what it is to be.
    """
    unknown = set(body) - {*_IDENTITY, "tags"}
    if unknown:
        raise invalid(
            f"a run is started with {', '.join((*_IDENTITY, 'tags'))}, not {sorted(unknown)}"
        )
    given = {name: body[name] for name in _IDENTITY if body.get(name) is not None}
    for name in ("session_id", "attempt", "global_steps"):
        if name in given:
            _count(name, given[name])
    for name in ("uid", "task_name", "data_source"):
        if name in given:
            _name(name, given[name])
    return Identity(
        run_id,
        given.pop("uid", run_id),
        given.pop("session_id", 0),
        **{**known, **given},
        tags=_tags(body.get("tags")),
    )


def group_of(body: Mapping[str, Any]) -> tuple[str | None, int, int | None]:
    """The uid, the number of sessions and the declared bytes of a group. Refusal: 400."""
    uid, room = body.get("uid"), body.get("declared_bytes")
    n = _count("n", body.get("n"))
    if not n:
        raise invalid("`n`, the number of sessions, is at least 1")
    return (
        None if uid is None else _name("uid", uid),
        n,
        None if room is None else _count("declared_bytes", room),
    )


def attempt_of(body: Mapping[str, Any]) -> int:
    """The attempt of a group that is to end. Refusal: 400."""
    return _count("attempt", body.get("attempt"))


def steps_of(body: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The trainer's step and the version that is served, where they are told. Refusal: 400."""
    step, version = body.get("global_steps"), body.get("policy_version")
    return (
        None if step is None else _count("global_steps", step),
        None if version is None else _count("policy_version", version),
    )


def _tags(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("`tags` is to be a JSON object")
    tags = cast("dict[str, Any]", value)
    own = [name for name in tags if name in _OWN_TAGS or name.startswith(RESERVED)]
    if own:
        raise invalid(f"these tags follow from the trajectory and are not given: {own}")
    return dict(tags)


def _name(field: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise invalid(f"`{field}` is a text of 1 to {_MAX_NAME} characters")
    return value


def _count(field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise invalid(f"`{field}` is a whole number from 0")
    return value
